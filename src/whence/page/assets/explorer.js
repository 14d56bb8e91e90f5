// The explorer: which run, which round, which moment; the address in the page's link; news from a run that goes on.
(() => {
  "use strict";

  const { element, isNumber, number, signed, withError, percent, id, source } = Whence;
  const POLL = 3000; // milliseconds
  const at = (name) => document.getElementById(name);
  const [runSelect, otherSelect, slider, spark, roundName, status, live] = ["run", "other", "round", "spark", "round-name", "status", "live"].map((name) => at(`explorer-${name}`));
  const [earlier, later] = [at("round-earlier"), at("round-later")];
  const page = source.page;
  const { language } = Whence;
  let chosen = { run: 0, round: null, record: null, other: null, otherRound: null, finding: null };
  let findings = []; // of the run
  let shown = null; // the first column's round
  let turn = 0;

  const run = () => page.runs[chosen.run];
  const columns = [makeColumn(0), makeColumn(1)];
  at("explorer-columns").append(...columns.map(({ node }) => node));
  const grid = Whence.makeGrid({
    holder: at("grid"), search: at("grid-search"), note: at("grid-note"), pages: at("grid-pages"), scope: at("grid-scope"),
    differs: at("grid-differs"), flagged: at("grid-flagged"), all: at("grid-all"), where: at("grid-where"), flagging: at("grid-flagging"),
    // Where all rounds are searched, a record's round is shown first.
    onOpen: async (record, from, round = chosen.round) => {
      if (round !== chosen.round) await choose({ round, otherRound: null });
      if (shown.round === round) openMoment(0, record, from);
    },
  });

  // A column: its strip, its worst and best moments, how far to trust the round.
  function makeColumn(place) {
    const heading = element("h3", { class: "column-name" });
    const trust = element("div");
    const answer = element("p", { class: "answer" });
    const notes = element("ul", { class: "notes" });
    const lists = element("div", { class: "ends" });
    const strip = Whence.makeStrip((record, from) => openMoment(place, record, from));
    const about = element("div", { class: "strip-about" }, element("h3"));
    const stripPart = element("div", { class: "strip-part" }, about, ...strip.nodes);
    const node = element("div", { class: "column", hidden: place > 0 }, heading, notes, answer, stripPart, lists, trust);
    let content = null;

    function show(runIndex, round) {
      content = { runIndex, round };
      node.hidden = false;
      heading.textContent = chosen.other === null ? "" : `${page.runs[runIndex].label}, round ${number(round.round)}`;
      const lines = round.trust ?? [];
      trust.replaceChildren(...(lines.length ? [element("h3", {}, "How far to trust the scores of this round"), element("p", {}, `This is about the scores of single ${Whence.one}s. What stands out in the run has a test of its own.`), Whence.lists.trust(lines)] : []));
      notes.replaceChildren(...(round.notes ?? []).map((text) => element("li", {}, text)));
      answer.replaceChildren(...tellWorst(round, page.runs[runIndex].actions));
      stripPart.hidden = !round.strip.record_ids.length;
      about.firstChild.textContent = language ? "Scores of the round" : round.scored ? "Influence over time" : "Records over time";
      if (at("about-scores")) at("about-scores").hidden = !round.scored;
      const { episodes, record_ids: ids } = round.strip;
      Whence.several = new Set(episodes.map(({ env }) => env)).size > 1;
      const named = place === 0 ? listNamed(round) : new Set();
      if (!stripPart.hidden) strip.show(round, named);
      // A moment is named if one of its records is; they stand side by side in the strip.
      const isNamed = ({ record, step, first_step: first, last_step: last }) => named.size > 0
        && (named.has(record) || ids.slice(ids.indexOf(record) - (step - first), ids.indexOf(record) + (last - step) + 1).some((one) => named.has(one)));
      const options = { onOpen: (record, from) => openMoment(place, record, from), language, isNamed, actions: page.runs[runIndex].actions };
      const order = [...round.worst, ...round.best].some(({ error }) => typeof error === "number") ? "the surest first" : "the largest first";
      lists.replaceChildren(...(round.scored ? [
        Whence.lists.moments(language ? "Responses that harm most" : "Most harmful moments", `Training on these lowers the target, ${order}.`, round.worst, options),
        Whence.lists.moments(language ? "Responses that help most" : "Most helpful moments", `Training on these raises the target, ${order}.`, round.best, options),
      ] : []));
    }

    return {
      node, strip, show, content: () => content,
      hide() { node.hidden = true; content = null; },
      // Where the focus returns to, if the card that opened a moment is not the one that is shown last.
      cardOf: (record) => node.querySelector(`[data-record="${record}"]`),
    };
  }

  function tellWorst(round, actions) {
    if (!round.records) return [`This round has no ${Whence.one}s that can be read.`];
    if (language && !round.scored) return [`This round has ${number(round.records)} responses, without scores.`];
    if (!round.scored) return [`This round has ${number(round.records)} records. None was scored, so nothing can be said about which of them harmed.`];
    const [worst] = round.worst;
    if (!worst) return [`No ${Whence.one} of this round scored below 0.`];
    const where = Whence.place(worst);
    const what = language ? `response ${id(worst.record)}` : `“${Whence.nameAction(worst.action, actions)}”${where ? ` at ${where}` : ""}`;
    const sure = worst.significant === false ? " That is within two errors: no measurable difference from 0." : worst.significant ? ` That is beyond two errors; of so many ${Whence.one}s, the surest may be so by chance.` : "";
    const common = language ? "" : " Sound training has such moments in every round.";
    const first = typeof worst.error === "number" ? "The surest score below 0" : "The lowest score";
    return [element("b", {}, first), ` has ${what}: ${withError(worst.score, worst.error)}.${sure}${common}`];
  }

  // The records of a round that the finding names which is followed.
  const followed = () => findings[chosen.finding];
  const listNamed = ({ round }) => new Set(followed()?.round === round ? followed().records : []);

  function openMoment(place, record, from) {
    const column = columns[place];
    const { runIndex, round } = column.content();
    const faces = [...round.worst, ...round.best].map((moment) => moment.record);
    const finding = place === 0 && listNamed(round).has(record) ? followed() : null;
    Whence.moment.show({
      run: runIndex, round: round.round, record, finding,
      list: finding && source.served ? finding.records : faces, // a file holds some of them
      returnTo: from ?? column.cardOf(record) ?? at("findings-list").querySelector(".named a") ?? slider,
      actions: page.runs[runIndex].actions,
      label: page.runs.length > 1 ? page.runs[runIndex].label : null,
      commands: page.runs[runIndex].commands,
      onFlag: () => grid.refresh(),
      onShow(now) {
        column.strip.open(now);
        if (place === 0) { chosen.record = now; writeLink(); }
      },
      onClose() {
        column.strip.open(null);
        chosen.record = null;
        writeLink();
      },
    });
  }

  function writeLink() {
    const parts = [`run=${chosen.run}`, `round=${chosen.round}`];
    if (chosen.record !== null) parts.push(`record=${chosen.record}`);
    if (chosen.finding !== null) parts.push(`finding=${chosen.finding + 1}`);
    if (chosen.other !== null) parts.push(`other=${chosen.other}`, `otherround=${chosen.otherRound}`);
    history.replaceState(null, "", `#${parts.join("&")}`);
  }

  // What the link asks for, as far as it is there; null if it asks for no moment.
  function readLink() {
    const parameters = new URLSearchParams(location.hash.slice(1));
    if (!parameters.has("run") && !parameters.has("round")) return null;
    const whole = (name) => (/^\d+$/.test(parameters.get(name) ?? "") ? Number(parameters.get(name)) : null);
    const there = (index) => index !== null && index < page.runs.length;
    const first = there(whole("run")) ? whole("run") : 0;
    const other = there(whole("other")) && whole("other") !== first ? whole("other") : null;
    return { run: first, round: whole("round"), record: whole("record"), other, otherRound: whole("otherround"), finding: whole("finding") ? whole("finding") - 1 : null };
  }

  const nearest = (rounds, wanted) => rounds.reduce((best, one) => (best === null || Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best), null);

  function summarise(place) {
    const { series } = run();
    const words = {
      round_return: (value) => `return ${signed(value)}`, round_length: (value) => `${number(value)} steps an episode`,
      episode_return: (value) => `return ${signed(value)} over the last 100 episodes`, test_return: (value) => `test return ${signed(value)}`,
      dropped_share: (value) => value && `${percent(value)} dropped`, negative_share: (value) => `${percent(value)} of the scores below 0`,
      significant_share: (value) => `${percent(value)} of the scores beyond two errors`,
    };
    return Object.entries(words).filter(([name]) => isNumber(series?.[name]?.[place])).map(([name, write]) => write(series[name][place])).filter(Boolean);
  }

  // The return over rounds, under the slider's thumb.
  const RETURNS = { round_return: "Return of a round’s episodes", episode_return: "Return of the last 100 episodes", test_return: "Test return" };
  function drawSpark() {
    const name = Object.keys(RETURNS).find((one) => run().series?.[one]?.some(isNumber));
    const { nodes, range } = Whence.drawSpark(name ? run().series[name] : [], run().rounds.indexOf(chosen.round), 50);
    spark.replaceChildren(...nodes);
    spark.toggleAttribute("hidden", !name);
    at("spark-name").textContent = name ? `${RETURNS[name]}, ${range}` : "";
  }

  function showControls() {
    const { rounds, planned, live: isLive } = run();
    const place = Math.max(0, rounds.indexOf(chosen.round));
    slider.max = Math.max(0, rounds.length - 1);
    slider.value = place;
    slider.disabled = rounds.length < 2;
    earlier.disabled = place <= 0;
    later.disabled = place >= rounds.length - 1;
    const all = isNumber(planned) ? ` of ${number(planned)}` : "";
    const name = `Round ${number(chosen.round)}${all}`;
    slider.setAttribute("aria-valuetext", [name, ...summarise(place)].join(", "));
    const one = followed();
    const why = one?.round === chosen.round && one.total ? [`Finding ${chosen.finding + 1} is about ${number(one.total)} of this round’s ${Whence.one}s, which are marked.`]
      : run().opens?.round === chosen.round ? [run().opens.why] : [];
    roundName.replaceChildren(element("b", {}, name), ...[...summarise(place), ...why].filter(Boolean).map((text) => element("span", {}, text)));
    runSelect.value = chosen.run;
    otherSelect.value = chosen.other ?? "";
    for (const option of otherSelect.options) option.disabled = option.value === String(chosen.run);
    live.hidden = !source.served || !isLive;
    drawSpark();
  }

  async function show() {
    const { rounds } = run();
    at("explorer-empty").hidden = rounds.length > 0;
    at("explorer-round-part").hidden = rounds.length === 0;
    if (!rounds.length) {
      showControls();
      return announce();
    }
    chosen.round = nearest(rounds, chosen.round ?? run().opens?.round ?? rounds.at(-1));
    const other = chosen.other === null ? null : page.runs[chosen.other];
    if (other?.rounds.length) chosen.otherRound = nearest(other.rounds, chosen.otherRound ?? chosen.round);
    else [chosen.other, chosen.otherRound] = [null, null];
    showControls();
    const mine = ++turn;
    const late = setTimeout(() => { status.textContent = `Loading round ${number(chosen.round)} …`; }, 300);
    try {
      const loads = [source.load(chosen.run, chosen.round)];
      if (chosen.other !== null) loads.push(source.load(chosen.other, chosen.otherRound));
      const [first, second] = await Promise.all(loads);
      if (mine !== turn) return;
      shown = first.round;
      at("explorer-columns").classList.toggle("two", Boolean(second));
      columns[0].show(chosen.run, first.round);
      if (second) columns[1].show(chosen.other, second.round);
      else columns[1].hide();
      status.textContent = "";
      await showRest(mine);
    } catch (error) {
      if (mine !== turn) return;
      status.textContent = error.gone ? "The server does not answer. Trying again …" : error.message;
      if (error.gone) setTimeout(() => mine === turn && show(), POLL);
    } finally {
      clearTimeout(late);
      announce();
    }
  }

  // The figures wait for it.
  const announce = () => document.dispatchEvent(new Event("explorer-shown"));

  // A prompt's responses: the first one opens, with the others beside it; the grid shows them.
  async function openPrompt(records, from) {
    grid.pick({ ids: records, words: "One prompt" });
    for (const record of records) if (await source.canOpen(chosen.run, chosen.round, record)) return openMoment(0, record, from);
    at("grid-part").scrollIntoView();
  }

  async function showRest(mine) {
    await Packed.load("tabulator-source");
    if (mine !== turn) return;
    if (language) {
      at("round-curves").replaceChildren(...Whence.responses.curves(run(), chosen.round, turnTo));
      at("prompts").hidden = !shown.prompts?.length;
      if (shown.prompts?.length) Whence.responses.prompts(at("prompts-body"), shown.prompts, openPrompt);
    }
    at("map").hidden = !shown.map;
    at("map-body").replaceChildren(...(shown.map ? Whence.map.show(shown.map) : []));
    await showGroups(mine);
    if (mine !== turn) return;
    at("grid-part").hidden = !shown.records;
    if (shown.records) grid.show(run(), chosen.run, shown, listNamed(shown));
  }

  // The columns by which groups are made stay from round to round.
  let by = ["region", "action"]; // regions have the longest names
  async function showGroups(mine) {
    const groupings = shown.groupings ?? [];
    for (const node of [at("groups"), at("groups-link")]) node?.toggleAttribute("hidden", !groupings.length);
    if (!groupings.length) return at("groups-body").replaceChildren();
    const keys = groupings.map(({ key }) => key);
    const [first] = [by[0], ...keys].filter((key) => keys.includes(key));
    // A file has groups by a few pairs only.
    const joins = (key) => key !== first && (!shown.pairs || shown.pairs.some((pair) => pair.includes(first) && pair.includes(key)));
    const second = by[1] === "" ? "" : [by[1], ...keys].find((key) => keys.includes(key) && joins(key)) ?? "";
    const options = (fits) => groupings.filter(({ key }) => fits(key)).map(({ key, name }) => element("option", { value: key }, name));
    at("groups-by").replaceChildren(...options(() => true));
    at("groups-across").replaceChildren(element("option", { value: "" }, "nothing else"), ...options(joins));
    [at("groups-by").value, at("groups-across").value] = [first, second];
    const chosenBy = [first, second].filter(Boolean);
    const names = chosenBy.map((key) => groupings.find((one) => one.key === key).name);
    const { run: runIndex, round } = chosen;
    try {
      const pivot = await source.loadPivot(runIndex, round, chosenBy);
      if (mine !== turn) return;
      const named = listNamed(shown).size ? (followed().groups ?? []).filter(([key]) => chosenBy.includes(key)).map(([, name]) => name) : [];
      const table = Whence.lists.pivot(pivot, names, run().actions, named, (groups) => {
        grid.pick({ groups: groups.map((name, k) => [chosenBy[k], name]), words: groups.join(", ") });
        at("grid-part").scrollIntoView();
      });
      at("groups-body").replaceChildren(element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Groups" }, table));
    } catch (error) {
      at("groups-body").replaceChildren(element("p", { class: "problem" }, error.message));
    }
  }

  for (const name of ["groups-by", "groups-across"]) {
    at(name).addEventListener("change", () => {
      by = [at("groups-by").value, at("groups-across").value];
      showGroups(turn);
    });
  }

  // What stands out: the page opens with the round of the first finding, unless the reader went elsewhere meanwhile.
  async function showFindings(mayOpen) {
    const runIndex = chosen.run;
    const answer = await source.loadFindings(runIndex).catch(() => null);
    if (!answer) return at("findings-status").replaceChildren();
    if (runIndex !== chosen.run) return;
    const list = findings = answer.findings ?? [];
    at("findings").hidden = at("findings-link").hidden = false;
    at("findings-status").textContent = list.length ? "" : answer.looked.silence;
    Whence.lists.showLooked(at("findings-looked"), answer.looked);
    at("findings-list").replaceChildren(...Whence.lists.findings(list, runIndex, followFinding));
    if (chosen.finding !== null) return followFinding(chosen.finding);
    if (list.length && mayOpen() && answer.opens?.round !== chosen.round && run().rounds.includes(answer.opens?.round)) {
      run().opens = answer.opens;
      choose({ round: answer.opens.round });
    }
  }

  // Shows a finding's round by the groups that it is about, and its records, which are marked wherever they stand.
  async function followFinding(place) {
    const finding = findings[place];
    [...at("findings-list").children].forEach((item, k) => item.classList.toggle("named", k === place));
    if (!finding || !run().rounds.includes(finding.round)) return;
    const { round, records, total, title, groups } = finding;
    chosen = { ...chosen, round, finding: place, otherRound: round === chosen.round ? chosen.otherRound : null };
    if (groups?.length) by = [groups[0][0], groups[1]?.[0] ?? ""];
    writeLink();
    await show();
    if (!records?.length) return at("explorer").scrollIntoView();
    grid.pick({ ids: records, words: `${title.replaceAll("`", "")}${total > records.length ? ` (the first ${records.length})` : ""}` });
    if (chosen.record === null) at("grid-part").scrollIntoView();
  }

  function choose(changes) {
    chosen = { ...chosen, ...changes, record: null, finding: null };
    for (const item of at("findings-list").children) item.classList.remove("named");
    const showing = show();
    writeLink();
    return showing;
  }

  function turnTo(place) {
    const { rounds } = run();
    const round = rounds[Math.max(0, Math.min(rounds.length - 1, place))];
    if (round !== undefined && round !== chosen.round) choose({ round, otherRound: null });
  }

  let frame = 0;
  slider.addEventListener("input", () => {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => turnTo(Number(slider.value)));
  });
  earlier.addEventListener("click", () => turnTo(Number(slider.value) - 1));
  later.addEventListener("click", () => turnTo(Number(slider.value) + 1));
  runSelect.addEventListener("change", () => {
    const index = Number(runSelect.value);
    choose({ run: index, otherRound: null, other: chosen.other === index ? null : chosen.other });
    showFindings(() => false);
  });
  otherSelect.addEventListener("change", () => choose({ other: otherSelect.value === "" ? null : Number(otherSelect.value), otherRound: null }));

  function listRuns() {
    const options = () => page.runs.map(({ label }, index) => element("option", { value: index }, label));
    runSelect.replaceChildren(...options());
    otherSelect.replaceChildren(element("option", { value: "" }, "nothing"), ...options());
    const several = page.runs.length > 1;
    for (const select of [runSelect, otherSelect]) select.closest("label").hidden = !several;
  }

  async function follow() {
    const place = readLink();
    if (!place) return false;
    chosen = { ...place, record: null };
    if (Whence.moment.isOpen()) Whence.moment.close();
    await show();
    if (followed()) await followFinding(chosen.finding);
    if (place.record !== null && shown) openMoment(0, place.record, null);
    return true;
  }

  window.addEventListener("hashchange", follow);

  // A run that goes on: new rounds extend the slider; if the last round was shown, the page follows.
  async function poll() {
    let wait = POLL;
    try {
      const news = await source.fetchJson("/api/page");
      if (status.dataset.gone) { status.textContent = ""; delete status.dataset.gone; }
      const before = JSON.stringify(page.runs.map(({ rounds }) => rounds));
      const followed = run().rounds.at(-1) === chosen.round || chosen.round === null;
      page.runs.splice(0, page.runs.length, ...news.runs);
      const isNew = JSON.stringify(page.runs.map(({ rounds }) => rounds)) !== before;
      if (isNew && followed && !Whence.moment.isOpen() && run().rounds.length) {
        chosen = { ...chosen, round: run().rounds.at(-1), otherRound: null };
        show();
      } else showControls();
      if (isNew) window.updateFigures(await source.fetchJson("/api/figures"));
    } catch (error) {
      status.textContent = error.gone ? "The server does not answer. Trying again …" : error.message;
      status.dataset.gone = "yes";
      wait = 2 * POLL;
    }
    if (page.runs.some(({ finished }) => !finished)) setTimeout(poll, wait);
  }

  if (source.served) {
    document.addEventListener("explorer-shown", () => source.fetchJson("/api/figures").then(window.updateFigures, ({ message }) => { at("figures").textContent = message; }), { once: true });
  }

  listRuns();
  follow().then(async (followed) => {
    if (!followed) {
      const scored = page.runs.findIndex(({ rounds, series }) => rounds.length && series?.negative_share?.some(isNumber));
      chosen.run = Math.max(0, scored);
      if (!source.served) await showFindings(() => false);
      await show();
    }
    const start = chosen;
    if (followed || source.served) {
      at("findings").hidden = at("findings-link").hidden = false;
      if (source.served) at("findings-status").textContent = "Looking for what stands out …";
      showFindings(() => !followed && chosen === start);
    }
  });
  if (source.served && page.runs.some(({ finished }) => !finished)) setTimeout(poll, POLL);
})();
