// A language model's responses: curves over rounds, the prompts of one, a response by turns and tokens, its group.
Whence.responses = (() => {
  "use strict";

  const { element, drawing, isNumber, number, signed, withError, id } = Whence;

  const plain = (text, label) => element("pre", { tabindex: 0, role: "group", "aria-label": label }, text);
  const facts = (list) => element("dl", {}, ...list.filter(([, value]) => value !== null && value !== undefined).map(([key, value]) =>
    element("div", {}, element("dt", {}, key), element("dd", {}, String(value)))));
  const rewardsOf = ({ rewards }) => Object.entries(rewards ?? {}).map(([name, value]) => [name, number(value)]);

  // One small curve for each number that rounds have; a click goes to a round.
  function curves(run, round, onPick) {
    const place = run.rounds.indexOf(round), n = run.rounds.length;
    return (run.curves ?? []).map(({ name, about, values }) => {
      const { nodes, range } = Whence.drawSpark(values, place, 60);
      const svg = drawing("svg", { viewBox: "0 0 1000 60", preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" }, ...nodes);
      svg.addEventListener("click", ({ clientX }) => {
        const box = svg.getBoundingClientRect();
        onPick(Math.round(((clientX - box.left) / box.width) * (n - 1)));
      });
      return element("figure", { title: about }, element("figcaption", {}, element("b", {}, name), element("span", {}, number(values[place]))), svg, element("p", {}, range));
    });
  }

  // The prompts of a round, sorted by a click on a heading.
  let table = null;
  function prompts(holder, list, onOpen) {
    table?.destroy();
    const rewards = Object.keys(list[0] ?? {}).filter((name) => name.startsWith("reward."));
    const narrow = matchMedia("(max-width: 600px)").matches; // the numbers of a prompt are then next to a shorter text
    const names = { ...(narrow ? {} : { responses: "responses" }), reward: "reward", ...(narrow ? {} : { spread: "± spread" }), ...Object.fromEntries(rewards.map((name) => [name, name.slice(7)])), ...(narrow ? { spread: "± spread", responses: "responses" } : {}), tokens: "tokens", ended: "ended", score: "score" };
    const numeric = Object.entries(names).filter(([key]) => list.some((row) => isNumber(row[key]))).map(([field, title]) => ({
      field, title, titleFormatter: () => element("span", {}, title), hozAlign: "right", headerHozAlign: "right", minWidth: narrow ? 76 : 84, sorter: "number",
      formatter: (cell) => (field === "score" ? signed(cell.getValue()) : number(cell.getValue())),
    }));
    const open = (row, from) => onOpen(row.records, from);
    const prompt = {
      field: "prompt", title: "prompt", minWidth: narrow ? 100 : 180, widthGrow: 4,
      formatter: (cell) => element("button", { type: "button", class: "link", onclick: (event) => { event.stopPropagation(); open(cell.getData(), event.currentTarget); } }, cell.getValue() || "(empty)"),
    };
    table = new Tabulator(holder, {
      data: list, columns: [prompt, ...numeric], layout: "fitColumns", nestedFieldSeparator: false, maxHeight: 330, columnDefaults: { headerSortTristate: false },
    });
    table.on("rowClick", (_event, row) => open(row.getData(), row.getElement().querySelector("button")));
    table.on("tableBuilt", () => { holder.setAttribute("aria-label", "Prompts"); holder.querySelector(".tabulator-tableholder")?.removeAttribute("tabindex"); });
  }

  // The sections of an opened response. `open(record)` opens another one, if `canOpen(record)` says so.
  function sections(detail, { open, canOpen, command, explain }) {
    const group = detail.group?.responses ?? [];
    const { tokens, turns } = detail;
    return [
      element("section", {}, element("h3", {}, "Prompt and response"), element("h4", {}, "Prompt"), speak(turns?.prompt, detail.prompt, "Prompt"),
        element("h4", {}, "Response"), speak(turns?.response, detail.response, "Response")),
      tokens || explain ? showTokens(tokens, explain, command) : null,
      !explain && command ? element("p", { class: "note" }, "The command ", element("code", {}, command), " tells which tokens its score comes from, in a round whose policy was kept.") : null,
      group.length > 1 ? showGroup(detail, group, open, canOpen) : null,
    ].filter(Boolean);
  }

  // A chat's turns under their roles, a text as it is.
  const speak = (turns, text, label) => (!turns ? plain(text ?? "", label) : element("ol", { class: "turns", "aria-label": label }, ...turns.map((turn) =>
    element("li", { class: ["system", "user", "tool"].includes(turn.role) ? turn.role : "assistant" }, element("b", {}, [turn.role || "no role", turn.name].filter(Boolean).join(" ")),
      turn.text ? plain(turn.text, turn.role || "turn") : null,
      ...(turn.calls ?? []).map((call) => element("p", { class: "call" }, "calls ", element("code", {}, call)))))));

  const SIGNALS = {
    parts: ["part of the score", "Above 0 (blue): training on this token raises the target. The parts sum to the score."],
    log_probs: ["log-prob", "Under the policy that drew the response. The more orange, the less likely the token was."],
    entropies: ["entropy", "In nats. The bluer, the more undecided the model was."],
    divergence: ["divergence", "Log-prob less the reference’s: blue tokens are likelier than under the reference."],
    ratios: ["ratio", "Probability after the round’s last step by that before: blue tokens became likelier."],
  };

  // A response’s tokens in the colours of one number; others stand in each token's title.
  function showTokens(stored, explain, command) {
    let tokens = stored ?? { texts: [] };
    const [choice, note, text, rest] = [element("div", { class: "jumps", role: "group", "aria-label": "Colour tokens by" }), element("p", { class: "note", role: "status" }), element("p", { class: "tokens" }), element("div")];
    const names = () => Object.keys(SIGNALS).filter((name) => tokens[name]?.some(isNumber));
    function paint(name) {
      const values = (tokens[name] ?? []).map((value) => (name === "ratios" && value > 0 ? Math.log(value) : value));
      const scale = Whence.colourScale(values), colours = Whence.palette();
      choice.replaceChildren(...names().map((one) => element("button", { type: "button", "aria-pressed": String(one === name), onclick: () => paint(one) }, SIGNALS[one][0])),
        ...(explain && !tokens.parts ? [element("button", { type: "button", class: "quiet", onclick: ask }, "Which tokens does its score come from?")] : []));
      note.textContent = name ? SIGNALS[name][1] : "";
      text.replaceChildren(...tokens.texts.map((word, at) => element("span", {
        title: names().map((one) => `${SIGNALS[one][0]} ${number(tokens[one][at])}`).join(", "),
        style: isNumber(values[at]) ? `background:color-mix(in srgb, ${colours[Whence.level(values[at], scale)]} 45%, transparent)` : null,
      }, word.replace(/\n/g, "⏎\n"))));
    }
    async function ask(event) {
      event.currentTarget.disabled = true;
      note.textContent = "Loading the model and taking the score apart …";
      try {
        const parts = await explain();
        tokens = { ...tokens, ...parts };
        paint("parts");
        note.append(...parts.notes.map((one) => ` ${one}`));
        rest.replaceChildren(...[["Training on it raises these", parts.pulls.filter(({ part }) => part > 0)], ["Training on it lowers these", parts.pulls.filter(({ part }) => part < 0).reverse()]].filter(([, pulls]) => pulls.length).flatMap(([heading, pulls]) => [
          element("h4", {}, `${heading} rows of the target`), element("ul", { class: "notes" }, ...pulls.map((pull) => element("li", {}, element("b", {}, signed(pull.part)), ` ${pull.record === null ? "demonstration" : `response ${id(pull.record)}`}: ${pull.prompt} → ${pull.response}`)))]));
      } catch (error) {
        note.textContent = command ? `${error.message}` : error.message;
        event.target.disabled = false;
      }
    }
    paint(names().includes("log_probs") ? "log_probs" : names()[0]);
    return element("section", {}, element("h3", {}, "Token by token"), choice, note, text, rest);
  }

  function showGroup({ group: { total }, record }, group, open, canOpen) {
    const left = total - group.length;
    return element("section", {}, element("h3", {}, `The ${number(total)} responses to this prompt`),
      element("p", {}, `The highest reward first${left > 0 ? `; ${number(left)} more are not shown` : ""}.`),
      element("ol", { class: "group-cards" }, ...group.map((one) => card(one, one.record === record, open, canOpen))));
  }

  function card(one, isThis, open, canOpen) {
    const { record, response, score, error, reward, advantage, tokens_count: tokens, ended, dropped } = one;
    const name = `Response ${id(record)}${isThis ? ", this one" : ""}`;
    const heading = element("h4", {}, name);
    if (!isThis) {
      canOpen(record).then((can) => {
        if (can) heading.replaceChildren(element("button", { type: "button", class: "link", onclick: () => open(record) }, name));
      }, () => {});
    }
    const list = facts([
      ["reward", signed(reward)], ...rewardsOf(one), ["advantage", signed(advantage)], ["score", isNumber(score) ? withError(score, error) : null],
      ["tokens", isNumber(tokens) ? `${number(tokens)}${ended === false ? ", cut" : ""}` : null], ["trained", dropped ? "no, dropped" : null],
    ]);
    const kind = !isNumber(score) ? "" : score < 0 ? "low" : "high";
    return element("li", { class: `group-card ${kind} ${isThis ? "own" : ""}` }, heading, list, plain(response ?? "", `Text of response ${id(record)}`));
  }

  // Answers to the same prompts, at any checkpoints of any runs.
  function answers() {
    const data = document.getElementById("answers-data");
    if (!data) return;
    const { prompts: asked, sources } = JSON.parse(data.textContent);
    const [body, search, note] = ["body", "search", "note"].map((name) => document.getElementById(`answers-${name}`));
    const runs = [...new Set(sources.map(({ run }) => run))];
    const name = ({ run, round }) => `${runs.length > 1 ? `${run}, ` : ""}${round ? `after round ${number(round)}` : "before training"}`;
    const boxes = sources.map((source, at) => element("input", { type: "checkbox", checked: at === 0 || sources[at + 1]?.run !== source.run, "aria-label": name(source), onchange: () => show() }));
    document.getElementById("answers-sources").append(...runs.map((run) => element("fieldset", {}, element("legend", {}, runs.length > 1 ? run : "After round"),
      ...sources.flatMap((source, at) => (source.run === run ? [element("label", {}, boxes[at], number(source.round))] : [])))));
    function show(most = 4) {
      const chosen = sources.filter((_, at) => boxes[at].checked);
      const wanted = search.value.trim().toLowerCase();
      const change = (at) => { const [first, last] = [chosen[0], chosen.at(-1)].map((one) => one?.answers[at]?.reward); return isNumber(first) && isNumber(last) ? Math.abs(last - first) : 0; };
      const places = [...asked.keys()].filter((at) => !wanted || [asked[at], ...chosen.map((one) => one.answers[at]?.text ?? "")].some((one) => one.toLowerCase().includes(wanted))).sort((one, other) => change(other) - change(one));
      const means = chosen.map((one) => one.answers.map((answer) => answer?.reward).filter(isNumber));
      note.textContent = chosen.map((one, k) => (means[k].length ? `${name(one)}: mean reward ${number(means[k].reduce((sum, value) => sum + value, 0) / means[k].length)}` : name(one))).join(" · ");
      body.replaceChildren(...places.slice(0, most).map((at) => element("div", { class: "answered" }, element("h3", {}, "Prompt"), plain(asked[at], "Prompt"),
        element("ol", { class: "group-cards" }, ...chosen.map((one, k) => reply(one, one.answers[at], k ? chosen[0].answers[at] : null))))),
      places.length > most ? element("button", { type: "button", class: "quiet", onclick: () => show(Infinity) }, `Show ${number(places.length - most)} more`) : "");
    }
    function reply(source, answer, first) {
      const change = isNumber(answer?.reward) && isNumber(first?.reward) ? answer.reward - first.reward : null;
      return element("li", { class: `group-card ${change > 0 ? "high" : change < 0 ? "low" : ""}` }, element("h4", {}, name(source)),
        !answer ? element("p", { class: "note" }, "Not asked.") : facts([["reward", isNumber(answer.reward) ? number(answer.reward) : null], ["change", change === null ? null : signed(change)]]),
        !answer ? null : first && first.text === answer.text ? element("p", { class: "note" }, "The same answer.") : plain(answer.text, `Answer ${name(source)}`));
    }
    search.addEventListener("input", () => show());
    show();
  }

  answers();
  return { curves, prompts, sections };
})();
