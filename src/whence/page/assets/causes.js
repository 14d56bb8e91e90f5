// What taught the policy an opened record's action: asked of the server, shown as a strip over rounds and as moments.
Whence.causes = (() => {
  "use strict";

  const { element, drawing, isNumber, number, signed, id } = Whence;
  const WAYS = {
    nearest: ["nearest gradients", "A score is the record's advantage × the cosine of its gradient with this action's: did what went better or worse than expected push the policy this way?"],
    influence: ["influence", "A score is how much training on the record raised this action's log-probability, to first order. Large gradients come first, whatever they are about."],
  };
  const WIDTH = 640, HEIGHT = 120;

  // A part of the panel for an agent's record: a button in served pages, the command in files; else null.
  function make(detail, view) {
    if (!view.commands.why || (detail.response !== undefined && detail.response !== null)) return null;
    const heading = element("h3", { hidden: Whence.source.served }, "What taught it this?");
    if (!Whence.source.served) {
      return element("section", {}, heading, element("p", { class: "note" }, "The command ", element("code", {}, view.commands.why.replace("{record}", detail.record)), " tells which moments of all rounds taught the policy this action."));
    }
    const status = element("p", { class: "note", role: "status" }, "");
    const answer = element("div");
    const button = element("button", { type: "button", onclick: () => ask(Object.keys(WAYS)[0]) }, "What taught it this?");
    const part = element("section", { class: "causes" }, heading,
      element("p", {}, "Scores every record of every round, later rounds included. Above 0 it speaks for this action, below against it."), button, status, answer);
    let turn = 0;

    async function ask(by) {
      const mine = ++turn;
      button.disabled = true;
      status.textContent = "Scoring all rounds …";
      try {
        const causes = await Whence.source.loadCauses(view.run, view.round, view.record, by);
        if (mine !== turn || !part.isConnected) return;
        status.textContent = "";
        button.hidden = true;
        heading.hidden = false;
        answer.replaceChildren(...show(causes, view, ask));
      } catch (error) {
        if (mine === turn) status.textContent = error.message;
      } finally {
        if (mine === turn) button.disabled = false;
      }
    }

    return part;
  }

  function show(causes, view, ask) {
    const ways = element("div", { class: "jumps", role: "group", "aria-label": "How moments are found" }, ...Object.entries(WAYS).map(([by, [name]]) =>
      element("button", { type: "button", "aria-pressed": String(by === causes.by), onclick: () => ask(by) }, `By ${name}`)));
    return [
      element("p", { class: "say high" }, causes.decision),
      element("p", {}, causes.text),
      ways,
      element("p", { class: "note" }, WAYS[causes.by][1]),
      drawRounds(causes),
      list("Speak for it most", causes.raised, view),
      list("Speak against it most", causes.lowered, view),
      ...causes.notes.map((note) => element("p", { class: "note" }, note)),
    ].filter(Boolean);
  }

  function drawRounds({ rounds, sums, round }) {
    const reach = Math.max(...sums.raised, ...sums.lowered.map(Math.abs)) || 1;
    const cell = WIDTH / rounds.length;
    const middle = HEIGHT / 2;
    const bars = rounds.flatMap((one, place) => [["raised", "high"], ["lowered", "low"]].map(([name, kind]) => {
      const size = (Math.abs(sums[name][place]) / reach) * (middle - 2);
      const bar = drawing("rect", { x: place * cell + cell * 0.08, width: Math.max(0.5, cell * 0.84), y: kind === "high" ? middle - size : middle, height: size, class: kind });
      bar.append(drawing("title", {}, `Round ${number(one)}: ${signed(sums.raised[place])} and ${signed(sums.lowered[place])}`));
      return bar;
    }));
    const index = rounds.indexOf(round);
    const marks = index < 0 ? [] : [drawing("line", { x1: (index + 0.5) * cell, x2: (index + 0.5) * cell, y1: 0, y2: HEIGHT, class: "face" })];
    const label = `Sums of scores above and below 0 for rounds ${number(rounds[0])} to ${number(rounds.at(-1))}`;
    return element("div", { class: "cause-rounds" },
      drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
        ...marks, ...bars, drawing("line", { x1: 0, x2: WIDTH, y1: middle, y2: middle, class: "zero" })),
      element("div", { class: "cause-axis" }, element("span", {}, `round ${number(rounds[0])}`), element("span", {}, "sums of scores above and below 0; dashed: this record's round"), element("span", {}, number(rounds.at(-1)))));
  }

  function list(heading, moments, view) {
    const cards = moments.map((moment, place) => {
      const where = Whence.place(moment);
      const stretch = moment.records > 1 ? `${moment.records} records` : null;
      const facts = [isNumber(moment.advantage) ? `advantage ${signed(moment.advantage)}` : null, stretch, `record ${id(moment.record)}`].filter(Boolean).join(" · ");
      const picture = moment.thumb
        ? element("img", { class: "thumb", src: moment.thumb, alt: "" })
        : element("span", { class: "thumb rank", "aria-hidden": "true" }, String(place + 1));
      return element("li", {}, element("button", { type: "button", class: `card ${moment.score < 0 ? "low" : "high"}`, onclick: () => open(moment, view) },
        picture,
        element("span", { class: "card-text" },
          element("span", { class: "what" }, element("b", {}, Whence.nameAction(moment.action, view.actions)), where ? ` at ${where}` : ""),
          element("span", { class: "why" }, `round ${number(moment.round)}`),
          element("span", { class: "facts-line" }, facts)),
        element("span", { class: "chip" }, signed(moment.score))));
    });
    return element("div", { class: "end" }, element("h4", {}, heading),
      cards.length ? element("ol", { class: "cards" }, ...cards) : element("p", { class: "note" }, "No record of any round did."));
  }

  // By the page's address, so that the browser's way back returns to this record.
  function open(moment, view) {
    const link = new URLSearchParams(location.hash.slice(1));
    if (link.get("run") !== String(view.run)) { link.delete("other"); link.delete("otherround"); }
    link.set("run", view.run);
    link.set("round", moment.round);
    link.set("record", moment.record);
    location.hash = link.toString();
  }

  return { make };
})();
