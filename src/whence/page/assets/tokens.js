// A language model's response: its tokens coloured by their parts of the score, and the other responses to its prompt.
Whence.tokens = (() => {
  "use strict";

  const { element, isNumber, number, signed, withError, id } = Whence;
  const HINT = "Point at a token, or move with the arrow keys.";

  const largest = (all) => Math.max(0, ...all.flatMap((tokens) => tokens?.parts.map(Math.abs) ?? [])) || 1;

  // A line break or a tab is shown as a sign, too: a token may be nothing else.
  const visible = (text) => text.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
  const quoted = (text) => `“${text.replace(/\n/g, "↵").replace(/\t/g, "⇥")}”`;

  function describe({ texts, parts }, place) {
    const part = parts[place];
    const effect = part < 0 ? "training on it lowers the target" : part > 0 ? "training on it raises the target" : "no effect";
    return `Token ${number(place + 1)} of ${number(texts.length)}, ${quoted(texts[place])}: ${signed(part)}, ${effect}`;
  }

  // A response whose tokens are coloured; `readout` says what the one under the pointer, or the cursor, counts.
  function heat(tokens, scale, label, readout) {
    const words = tokens.texts.map((text, place) => {
      const part = tokens.parts[place];
      const share = Math.min(1, Math.abs(part) / scale) ** 0.8;
      const kind = share < 0.01 ? "" : part < 0 ? "low" : "high";
      return element("span", { class: `token ${kind}`, "data-place": place, style: kind ? `--share:${share.toFixed(2)}` : null }, visible(text));
    });
    let at = -1;
    const point = (place) => {
      words[at]?.classList.remove("at");
      at = place;
      words[at]?.classList.add("at");
      readout.textContent = at < 0 ? HINT : describe(tokens, at);
    };
    const node = element("pre", { class: "tokens", tabindex: 0, role: "group", "aria-label": label }, ...words);
    node.addEventListener("pointerover", ({ target }) => point(Number(target.closest(".token")?.dataset.place ?? -1)));
    node.addEventListener("pointerleave", () => point(-1));
    node.addEventListener("blur", () => point(-1));
    node.addEventListener("keydown", (event) => {
      const last = words.length - 1;
      const moves = { ArrowRight: Math.min(last, at + 1), ArrowLeft: Math.max(0, at - 1), Home: 0, End: last };
      if (!(event.key in moves)) return;
      point(moves[event.key]);
      words[at].scrollIntoView({ block: "nearest" });
      event.preventDefault();
    });
    return node;
  }

  const makeReadout = () => element("p", { class: "readout", role: "status" }, HINT);

  const plain = (text, label) => element("pre", { tabindex: 0, role: "group", "aria-label": label }, text);

  // The sections of an opened response. `open(record)` opens another one, if `canOpen(record)` says so.
  function sections(detail, { open, canOpen }) {
    const group = detail.group?.responses ?? [];
    // A response alone shows what counts within it; next to others it shows which of them counts.
    const shared = largest(group.map(({ tokens }) => tokens));
    return [showOne(detail, largest([detail.tokens])), group.length > 1 ? showGroup(detail, group, shared, open, canOpen) : null];
  }

  function showOne({ prompt, response, tokens }, scale) {
    const readout = makeReadout();
    const parts = tokens
      ? [
          heat(tokens, scale, "Response, coloured by each token's part of the score", readout),
          element("div", { class: "strip-foot" }, readout, legend()),
          element("p", { class: "note" }, `A token's part is what training on this token does to the target. The parts sum to the score.${tellRest(tokens)}`),
        ]
      : [plain(response, "Response"), element("p", { class: "note" }, "Which tokens its score comes from was not stored; training with --token-parts does so, and the command “whence llm why” tells it of a round whose policy was kept.")];
    return element("section", {}, element("h3", {}, "Prompt and response"),
      element("h4", {}, "Prompt"), plain(prompt ?? "", "Prompt"), element("h4", {}, "Response"), ...parts);
  }

  const tellRest = ({ left_out: rest }) => (rest ? ` ${number(rest)} more tokens are not shown.` : "");

  const legend = () => element("p", { class: "legend" }, element("span", { class: "ramp", "aria-hidden": "true" }), "lowers to raises the target");

  function showGroup(detail, group, scale, open, canOpen) {
    const left = (detail.group.total ?? group.length) - group.length;
    const readout = makeReadout();
    const cards = group.map((one) => card(one, one.record === detail.record, scale, readout, open, canOpen));
    const coloured = group.some(({ tokens }) => tokens);
    return element("section", {}, element("h3", {}, `The ${number(detail.group.total)} responses to this prompt`),
      element("p", {}, `The highest reward first${left > 0 ? `; ${number(left)} more are not shown` : ""}.`),
      coloured ? element("div", { class: "strip-foot follows" }, readout, legend()) : null,
      element("ol", { class: "group-cards" }, ...cards));
  }

  function card({ record, response, tokens, score, error, reward, advantage, dropped }, isThis, scale, readout, open, canOpen) {
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
    const label = `Response of record ${id(record)}`;
    const kind = !isNumber(score) ? "" : score < 0 ? "low" : "high";
    return element("li", { class: `group-card ${kind} ${isThis ? "own" : ""}` }, heading, list,
      tokens ? heat(tokens, scale, label, readout) : plain(response ?? "", label));
  }

  return { sections };
})();
