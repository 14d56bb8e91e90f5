// A language model's response that is opened, and the other responses to its prompt.
Whence.responses = (() => {
  "use strict";

  const { element, isNumber, number, signed, withError, id } = Whence;

  const plain = (text, label) => element("pre", { tabindex: 0, role: "group", "aria-label": label }, text);

  // The sections of an opened response. `open(record)` opens another one, if `canOpen(record)` says so.
  function sections(detail, { open, canOpen, command }) {
    const group = detail.group?.responses ?? [];
    return [showOne(detail, command), group.length > 1 ? showGroup(detail, group, open, canOpen) : null];
  }

  function showOne({ prompt, response }, command) {
    return element("section", {}, element("h3", {}, "Prompt and response"),
      element("h4", {}, "Prompt"), plain(prompt ?? "", "Prompt"),
      element("h4", {}, "Response"), plain(response, "Response"),
      element("p", { class: "note" }, "The command ", element("code", {}, command), " tells which tokens its score comes from, in a round whose policy was kept."));
  }

  function showGroup({ group: { total }, record }, group, open, canOpen) {
    const left = total - group.length;
    return element("section", {}, element("h3", {}, `The ${number(total)} responses to this prompt`),
      element("p", {}, `The highest reward first${left > 0 ? `; ${number(left)} more are not shown` : ""}.`),
      element("ol", { class: "group-cards" }, ...group.map((one) => card(one, one.record === record, open, canOpen))));
  }

  function card({ record, response, score, error, reward, advantage, dropped }, isThis, open, canOpen) {
    const name = `Record ${id(record)}${isThis ? ", this one" : ""}`;
    const heading = element("h4", {}, name);
    if (!isThis) {
      canOpen(record).then((can) => {
        if (can) heading.replaceChildren(element("button", { type: "button", class: "link", onclick: () => open(record) }, name));
      }, () => {});
    }
    const facts = [
      ["reward", signed(reward)], ["advantage", signed(advantage)], ["score", isNumber(score) ? withError(score, error) : "–"],
      ["trained", dropped ? "no, dropped" : "yes"],
    ];
    const list = element("dl", {}, ...facts.map(([key, value]) => element("div", {}, element("dt", {}, key), element("dd", {}, value))));
    const kind = !isNumber(score) ? "" : score < 0 ? "low" : "high";
    return element("li", { class: `group-card ${kind} ${isThis ? "own" : ""}` }, heading, list, plain(response ?? "", `Response of record ${id(record)}`));
  }

  return { sections };
})();
