// A moment opens in a panel: what happened, frames, curves, whether the advantage was right, what the round changed.
Whence.moment = (() => {
  "use strict";

  const { element, isNumber, number, signed, withError, percent, id } = Whence;
  const dialog = document.getElementById("moment");
  const body = element("div", { class: "moment-body" });
  const title = element("h2", { id: "moment-title" });
  const place = element("p", { class: "moment-place" });
  const copied = element("span", { class: "copied", role: "status" });
  const button = (text, label, action) => element("button", { type: "button", "aria-label": label, onclick: action }, text);
  const previous = button("‹ Previous", `Previous ${Whence.language ? "response" : "moment"}`, () => step(-1));
  const next = button("Next ›", `Next ${Whence.language ? "response" : "moment"}`, () => step(1));
  const SMALL = 97; // pixels across, below which a picture is shown enlarged
  let view = null, timer = 0, call = 0;

  dialog.append(
    element("div", { class: "moment-head" },
      element("div", {}, title, place),
      element("div", { class: "moment-buttons" }, previous, next, button("Copy link", null, copyLink), copied, button("✕", "Close", () => dialog.close())),
    ),
    body,
  );
  // Closing says so in a task of its own, by when another moment may be open.
  dialog.addEventListener("close", () => { if (!dialog.open) leave(); });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

  function leave() {
    clearInterval(timer);
    call += 1;
    const { returnTo, onClose } = view ?? {};
    view = null;
    onClose?.();
    // The panel may have moved on to another moment, whose card is then the place to return to.
    if (returnTo?.isConnected) returnTo.focus();
  }

  function close() {
    dialog.close();
    leave();
  }

  async function copyLink() {
    const address = location.href;
    try {
      await navigator.clipboard.writeText(address);
    } catch {
      // Pages from files may not use the clipboard's interface.
      const field = element("textarea", { class: "away", "aria-hidden": "true", tabindex: -1 });
      field.value = address;
      dialog.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    copied.textContent = "Copied";
    setTimeout(() => { copied.textContent = ""; }, 2000);
  }

  function step(by) {
    const { list } = view;
    const at = list.indexOf(view.record);
    const to = list[at + by];
    if (to !== undefined) show({ ...view, record: to });
  }

  // view: {run, round, record, list: records to step through, finding, label, returnTo, onShow, onClose}
  async function show(moment) {
    view = moment;
    const turn = ++call;
    clearInterval(timer);
    const { run, round, record, list } = view;
    title.textContent = `${Whence.One} ${id(record)}`;
    place.textContent = "Loading …";
    const at = list.indexOf(record);
    previous.disabled = at <= 0;
    next.disabled = at < 0 || at >= list.length - 1;
    if (!dialog.open) { body.replaceChildren(); dialog.showModal(); }
    view.onShow?.(record);
    let detail;
    try {
      detail = await Whence.source.loadDetail(run, round, record);
    } catch (error) {
      if (turn === call) {
        place.textContent = `Round ${number(round)}`;
        body.replaceChildren(element("p", { class: "problem" }, error.message));
      }
      return;
    }
    if (turn === call) fill(detail);
  }

  function fill(detail) {
    const where = Whence.place(detail);
    place.textContent = [view.label, `round ${number(detail.round)}`, where, detail.dropped ? "dropped" : "trained"].filter(Boolean).join(" · ");
    if (isResponse(detail)) return fillResponse(detail);
    const shown = makePlayer(detail);
    const story = tell(detail);
    const judged = judge(detail);
    if (detail.mc_pending) measure(story, judged, detail);
    body.replaceChildren(...[recall(), story, flag(detail), shown, Whence.causes.make(detail, view), judged, metrics(detail), policy(detail), state(detail)].filter(Boolean));
    body.scrollTop = 0;
  }

  // A reader may step on to records that the finding does not name.
  const isNamed = () => view.finding?.round === view.round && view.finding.records.includes(view.record);
  const recall = () => isNamed() ? element("p", { class: "note" }, "Part of the finding: ", ...Whence.withCode(view.finding.title), ".") : null;

  const isResponse = ({ response }) => response !== undefined && response !== null;

  function fillResponse(detail) {
    const { run, round } = view;
    const sections = Whence.responses.sections(detail, {
      command: view.commands.why?.replace("{record}", detail.record),
      explain: Whence.source.served && view.commands.why ? () => Whence.source.loadCauses(run, round, view.record, "influence") : null,
      open: (record) => show({ ...view, record }),
      canOpen: (record) => Whence.source.canOpen(run, round, record),
    });
    body.replaceChildren(...[recall(), tell(detail), flag(detail), ...sections, metrics(detail, "All its numbers")].filter(Boolean));
    body.scrollTop = 0;
  }

  async function measure(told, judged, detail) {
    const turn = call;
    let measured;
    try {
      measured = await Whence.source.loadAdvantage(view.run, view.round, view.record);
    } catch (error) {
      measured = { mc_text: error.message };
    }
    if (turn !== call) return;
    const now = { ...detail, mc_pending: false, ...measured };
    told.replaceWith(tell(now));
    judged.replaceWith(judge(now));
  }

  // A flag and a note: set on a served page, read in a file.
  function flag(detail) {
    if (!Whence.source.served) return typeof detail.flag === "string" ? part("Flagged", detail.flag) : null;
    const { run, round, record, onFlag } = view;
    const note = element("input", { type: "text", maxlength: 500, placeholder: "a note, if you like", "aria-label": "Note", value: detail.flag ?? "" });
    const save = element("button", { type: "button", onclick: () => store(note.value.trim()) });
    const remove = element("button", { type: "button", class: "quiet", onclick: () => store(null) }, "Remove flag");
    const status = element("span", { role: "status" });
    const label = () => {
      save.textContent = typeof detail.flag === "string" ? "⚑ Save note" : `⚑ Flag this ${Whence.one}`;
      remove.hidden = typeof detail.flag !== "string";
    };
    async function store(text) {
      try {
        detail.flag = (await Whence.source.saveFlag(run, round, record, text)).flag;
        status.textContent = text === null ? "Removed." : "Saved with the run.";
        if (text === null) note.value = "";
      } catch (error) {
        status.textContent = error.message;
      }
      label();
      onFlag?.();
    }
    note.addEventListener("keydown", (event) => { if (event.key === "Enter") store(note.value.trim()); });
    label();
    return element("section", { class: "flag" }, element("div", { class: "jumps" }, note, save, remove, status));
  }

  function metrics({ metrics: list, end }, heading = "What the environment said") {
    const facts = [...(list ?? [])];
    if (end) facts.push({ name: "episode", value: end });
    return facts.length ? part(heading, null, entries(facts)) : null;
  }

  const part = (heading, about, ...children) =>
    element("section", {}, element("h3", {}, heading), about ? element("p", {}, about) : null, ...children);

  function tell(detail) {
    const main = detail.targets?.[0];
    const index = detail.window ? detail.window.record_ids.indexOf(detail.record) : -1;
    const reward = detail.window?.rewards?.[index];
    const value = detail.window?.values?.[index] ?? detail.value_before;
    const lines = [];
    if (isResponse(detail)) {
      const effect = !isNumber(detail.advantage) || detail.advantage === 0 ? "" : `, so training makes the response ${detail.advantage > 0 ? "more" : "less"} likely`;
      const advantage = isNumber(detail.advantage) ? `The advantage was ${signed(detail.advantage)}${effect}.` : "";
      const parts = Object.entries(detail.rewards ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
      const paid = isNumber(detail.reward) ? `The reward was ${signed(detail.reward)}${parts ? ` (${parts})` : ""}. ` : "";
      const cut = detail.ended === false ? " It was cut at the limit of tokens." : "";
      lines.push(element("p", {}, `${paid}${advantage}${cut}`));
    } else {
      const where = Whence.place(detail);
      const cut = isNumber(detail.bootstrap) ? ` A time limit cut the episode here: training added ${signed(detail.bootstrap)} for what would have followed.` : "";
      const trained = detail.trained_reward - (detail.bootstrap ?? 0);
      const isScaled = isNumber(detail.trained_reward) && Math.abs(trained - reward) > 1e-4 * Math.max(1, Math.abs(reward));
      const unit = isScaled ? ` in the environment and ${signed(trained)} in training, which is the unit of the critic's values and of advantages` : "";
      const paid = (isNumber(reward) ? ` The reward was ${signed(reward)}${unit}.` : "") + cut;
      lines.push(element("p", {}, where ? `At ${where} the agent chose ` : "The agent chose ", element("b", {}, Whence.nameAction(detail.action, view.actions)), ".", paid));
    }
    if (isNumber(value) && isNumber(detail.advantage)) {
      const text = `The critic expected ${signed(value)}; what followed was estimated at ${signed(value + detail.advantage)}.`;
      lines.push(element("p", {}, `${text} The advantage is the difference, ${signed(detail.advantage)}${Whence.explainAdvantage(detail.advantage)}.`));
    }
    if (isNumber(detail.mc_advantage) && isNumber(detail.advantage)) {
      const [, heading] = Whence.judgeAdvantage(detail.advantage, detail.mc_advantage, detail.mc_error);
      lines.push(element("p", {}, `Fresh rollouts from this state measured ${withError(detail.mc_advantage, detail.mc_error)}. `, element("b", {}, heading)));
    }
    const kind = !main || main.significant === false ? "fair" : main.score < 0 ? "low" : "high";
    const each = main && detail.tokens_count ? ` (${signed(main.score / detail.tokens_count)} a token)` : "";
    const score = main ? `Score ${withError(main.score, main.error)}${each}. ` : "";
    lines.push(element("p", { class: `say ${kind}` }, element("b", {}, score + Whence.explainScore(main?.score, main?.significant, main?.name))));
    const fate = detail.dropped
      ? `It was dropped, so the round did not train on it${detail.reason?.trim() ? `: ${detail.reason.trim()}` : ""}.`
      : `The round trained on it${isNumber(detail.weight) && detail.weight !== 1 ? ` with weight ${number(detail.weight)}` : ""}.`;
    lines.push(element("p", {}, fate));
    return element("section", { class: "story" }, ...lines);
  }

  // Frames, curves and the slider that moves both.
  function makePlayer(detail) {
    const { window, frames } = detail;
    const note = detail.frames_note ? element("p", { class: "note" }, detail.frames_note) : null;
    const n = window?.record_ids.length ?? 0;
    if (n < 2 && !frames) return note ? part("What it saw", null, note) : null;
    const steps = n && window.steps?.some(isNumber) ? window.steps : null;
    const face = n ? Math.max(0, window.record_ids.indexOf(detail.record)) : 0;
    // Positions of the slider: the window's records, and the frames beyond them, if any.
    const places = steps ? [...steps] : frames ? [...frames.steps] : Array.from({ length: n }, (_, at) => at - face);
    if (steps && frames) for (const at of frames.steps) if (at > places.at(-1)) places.push(at);
    const start = steps ? face : frames ? frames.face : face;
    let at = start;

    const image = frames ? element("img", { alt: "", class: frames.width < SMALL && "small", width: frames.width, height: frames.height }) : null;
    const stage = element("p", { class: "stage" });
    const slider = element("input", { type: "range", min: 0, max: places.length - 1, step: 1, "aria-label": "Step of the episode" });
    const play = element("button", { type: "button", class: "play" }, "▶ Play");
    const readout = element("p", { class: "readout" });
    const open = element("button", { type: "button", class: "quiet" }, "Open this record");
    const curves = n > 1 ? Whence.makeCurves(window, face, (to) => { pause(); move(to); }) : null;
    const faceStep = places[start];

    function frameAt(step) {
      let best = 0;
      frames.steps.forEach((one, k) => { if (Math.abs(one - step) < Math.abs(frames.steps[best] - step)) best = k; });
      return best;
    }

    function move(to) {
      at = to;
      slider.value = at;
      const step = places[at];
      const away = step - faceStep;
      const when = away === 0 ? "the moment" : `${number(Math.abs(away))} ${Math.abs(away) === 1 ? "step" : "steps"} ${away < 0 ? "before" : "after"}`;
      const text = steps || frames ? `Step ${number(step)}: ${when}` : when;
      slider.setAttribute("aria-valuetext", text);
      stage.textContent = text;
      stage.classList.toggle("now", away === 0);
      if (image) {
        const nearest = frameAt(step);
        if (image.dataset.frame !== String(nearest)) {
          image.src = frames.images[nearest];
          image.dataset.frame = nearest;
        }
        const drawnStep = frames.steps[nearest];
        image.alt = `What the agent saw at step ${number(drawnStep)}`;
        image.classList.toggle("other", drawnStep !== step);
        if (drawnStep !== step) stage.textContent = `${text} (the picture is of step ${number(drawnStep)})`;
      }
      const inside = at < n;
      curves?.show(Math.min(at, n - 1));
      const facts = !inside || !n ? [] : [
        window.actions ? Whence.nameAction(window.actions[at], view.actions) : null,
        window.rewards ? `reward ${signed(window.rewards[at])}` : null,
        window.values ? `V ${signed(window.values[at])}` : null,
        window.advantages ? `advantage ${signed(window.advantages[at])}` : null,
        window.scores ? `score ${withError(window.scores[at], window.errors?.[at])}` : null,
        window.dropped?.[at] ? "dropped" : null,
      ].filter(Boolean);
      readout.textContent = facts.join(" · ");
      const other = inside && n ? window.record_ids[at] : null;
      open.hidden = true;
      if (other !== null && other !== detail.record) {
        const { run, round } = view;
        Whence.source.canOpen(run, round, other).then((can) => { if (at === to) open.hidden = !can; }, () => {});
        open.onclick = () => show({ ...view, record: other });
      }
    }

    function pause() {
      clearInterval(timer);
      timer = 0;
      play.textContent = "▶ Play";
    }

    slider.addEventListener("input", () => { pause(); move(Number(slider.value)); });
    play.addEventListener("click", () => {
      if (timer) return pause();
      if (at >= places.length - 1) move(0);
      play.textContent = "❚❚ Pause";
      timer = setInterval(() => (at >= places.length - 1 ? pause() : move(at + 1)), Whence.calm() ? 400 : 110);
    });
    const jump = (text, to) => element("button", { type: "button", onclick: () => { pause(); move(to); } }, text);
    const jumps = element("div", { class: "jumps", role: "group", "aria-label": "Jump" },
      play, jump("Before", Math.max(0, start - 8)), jump("At the moment", start), jump("After", Math.min(places.length - 1, start + 8)));
    move(start);
    return part("Before, at and after", null,
      image ? element("figure", {}, image) : note,
      stage, slider, jumps, curves?.node ?? null, element("div", { class: "read" }, readout, open), image ? note : null);
  }

  function judge(detail) {
    const judged = Whence.judgeAdvantage(detail.advantage, detail.mc_advantage, detail.mc_error);
    const [kind, heading, sentence] = detail.mc_pending ? ["unknown", "Being measured …", ""] : judged;
    const bars = isNumber(detail.mc_advantage) ? compareAdvantages(detail) : null;
    return part("Was the advantage right?", null,
      element("p", { class: `say ${kind}` }, element("b", {}, heading), sentence ? ` ${sentence}` : ""),
      bars, element("p", { class: "note" }, ...Whence.withCode(detail.mc_text || `\`${view.commands.view}\` measures it by fresh rollouts when a record is opened.`)));
  }

  function compareAdvantages({ advantage, mc_advantage: truth, mc_error: error }) {
    const margin = 2 * (error ?? 0);
    const reach = Math.max(Math.abs(advantage), Math.abs(truth) + margin) || 1;
    const row = (name, value, spread) => {
      const middle = 50 + (value / reach) * 48;
      const bar = element("span", { class: `bar ${value < 0 ? "low" : "high"}`, style: `left:${Math.min(50, middle)}%;width:${Math.abs(middle - 50)}%` });
      const whisker = spread ? element("span", { class: "whisker", style: `left:${middle - (spread / reach) * 48}%;width:${(2 * spread / reach) * 48}%` }) : null;
      return element("div", { class: "measure" }, element("span", {}, name), element("span", { class: "track", "aria-hidden": "true" }, bar, whisker), element("span", { class: "figure-text" }, withError(value, spread ? spread / 2 : null)));
    };
    return element("div", { class: "measures" }, row("advantage in training", advantage), row("fresh rollouts", truth, margin));
  }

  function policy(detail) {
    const { policy: change } = detail;
    const values = isNumber(detail.value_before)
      ? `The critic's value of this state: ${signed(detail.value_before)}${isNumber(detail.value_after) ? ` before the round, ${signed(detail.value_after)} after` : ""}.`
      : null;
    if (!change) return values ? part("What the round changed here", values) : null;
    const bar = (share) => element("span", { class: "track plain", "aria-hidden": "true" }, element("span", { class: "bar share", style: `left:0;width:${Math.max(0, Math.min(1, share)) * 100}%` }));
    const row = (label, cells) => element("tr", {}, element("th", { scope: "row" }, label), ...cells.map((cell) => element("td", {}, ...[cell].flat())));
    let head, rows;
    if (change.kind === "discrete") {
      head = ["action", "before the round", "after the round"];
      rows = change.labels.map((label, k) => row(label, [[bar(change.before[k]), percent(change.before[k])], change.after ? [bar(change.after[k]), percent(change.after[k])] : "–"]));
    } else {
      head = ["action", "mean before", "mean after", "std before", "std after"];
      rows = change.labels.map((label, k) => row(label, ["mean_before", "mean_after", "std_before", "std_after"].map((name) => number(change[name]?.[k]))));
    }
    return part("What the round changed here", values, table("Probabilities of actions before and after the round", head, rows, "probabilities"));
  }

  function table(label, head, rows, kind) {
    const caption = element("caption", {}, label);
    const headings = element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)));
    return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
      element("table", { class: kind }, caption, element("thead", {}, headings), element("tbody", {}, ...rows)));
  }

  function state(detail) {
    if (!detail.state?.length) return null;
    const list = entries(detail.state);
    const rest = detail.state_size > detail.state.length ? ` first ${detail.state.length} of ${number(detail.state_size)}` : ` ${detail.state.length}`;
    const shown = detail.state.length <= 24 ? list : element("details", {}, element("summary", {}, `The${rest} entries of the observation`), list);
    const normalised = detail.normalised?.length ? element("details", {}, element("summary", {}, "The same as the policy saw it, normalised"), entries(detail.normalised)) : null;
    return part("The state the agent was in", null, shown, normalised);
  }

  const entries = (list) => element("dl", { class: "state" }, ...list.map(({ name, value }) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, isNumber(value) ? number(value, 4) : String(value ?? "–")))));

  return { show, close, isOpen: () => dialog.open };
})();
