// Lists: what stands out in a run; of a round its moments and its groups.
Whence.lists = (() => {
  "use strict";

  const { element, isNumber, number, signed, withError, id } = Whence;
  const FIRST = 6; // cards before "show all"

  function advantageWords({ advantage, score, significant }) {
    if (!isNumber(advantage)) return "";
    const size = `advantage ${signed(advantage)}`;
    if (significant === false || !isNumber(score) || advantage === 0) return size;
    if (Whence.language) return `${size}, so training makes it ${advantage > 0 ? "likelier" : "less likely"}`;
    if (score < 0) return `${size} ${advantage > 0 ? "praised it" : "blamed it"}, which lowers the target`;
    return `${size} ${advantage > 0 ? "praised it" : "blamed it"}, which raises the target`;
  }

  function card(moment, rank, { onOpen, language, actions, isNamed }) {
    const kind = moment.significant === false ? "unsure" : moment.score < 0 ? "low" : "high";
    const where = Whence.place(moment);
    const stretch = moment.records > 1 && isNumber(moment.first_step)
      ? `${moment.records} records, steps ${number(moment.first_step)} to ${number(moment.last_step)}`
      : null;
    const fate = moment.dropped ? (moment.records > 1 ? `${moment.dropped} of ${moment.records} dropped` : "dropped") : "trained";
    const named = isNamed(moment);
    const facts = [isNumber(moment.reward) ? `reward ${signed(moment.reward)}` : null, stretch, fate, named ? "named by the finding" : null].filter(Boolean).join(" · ");
    const picture = moment.thumb
      ? element("img", { class: "thumb", src: moment.thumb, alt: "", loading: "lazy" })
      : element("span", { class: "thumb rank", "aria-hidden": "true" }, String(rank));
    const what = language ? [element("b", {}, `Response ${id(moment.record)}`), moment.text ? ` ${moment.text}` : ""] : [element("b", {}, Whence.nameAction(moment.action, actions)), where ? ` at ${where}` : ""];
    return element("li", {}, element("button", { type: "button", class: `card ${kind}${named ? " named" : ""}`, "data-record": moment.record, onclick: (event) => onOpen(moment.record, event.currentTarget) },
      picture,
      element("span", { class: "card-text" },
        element("span", { class: "what" }, ...what),
        element("span", { class: "why" }, advantageWords(moment)),
        element("span", { class: "facts-line" }, facts)),
      element("span", { class: "chip" }, withError(moment.score, moment.error), moment.significant === false ? element("small", {}, "not beyond 2 errors") : null)));
  }

  // A titled list of moments; the first few, and all when asked for.
  function moments(heading, effect, list, options) {
    const known = list.filter(({ significant }) => typeof significant === "boolean");
    const beyond = known.filter(({ significant }) => significant).length;
    const sure = !known.length ? "" : beyond ? ` ${number(beyond)} of ${number(list.length)} are beyond two errors.` : ` None of ${number(list.length)} is beyond two errors, so their order may be chance.`;
    const about = effect + sure;
    const items = element("ol", { class: "cards" });
    const add = (from, to) => list.slice(from, to).forEach((moment, k) => items.append(card(moment, from + k + 1, options)));
    add(0, FIRST);
    const more = list.length > FIRST
      ? element("button", { type: "button", class: "quiet", onclick: () => {
          add(FIRST);
          more.remove();
          items.children[FIRST].querySelector("button").focus();
        } }, `Show ${list.length - FIRST} more`)
      : null;
    return element("div", { class: "end" }, element("h3", {}, heading), element("p", {}, about),
      list.length ? items : element("p", { class: "note" }, "None in this round."), more);
  }

  // Groups by one column as bars, by two as a table of cells; a click calls onPick with the group's names. `named` are
  // the names of groups that a finding is about.
  function pivot({ rows, columns, cells }, headings, labels, named, onPick) {
    const isNamed = (name, other) => named.length > 0 && named.every((one) => one === name || one === other);
    const classes = (...words) => words.filter(Boolean).join(" ") || null;
    const show = (name, place) => (headings[place] === "action" ? Whence.nameAction(name, labels) : name);
    const pick = (cell, label, ...content) => element("button", { type: "button", "aria-label": label, onclick: () => onPick(columns ? [rows[cell[0]], columns[cell[1]]] : [rows[cell[0]]]) }, ...content);
    const say = ([, , records, mean, error]) => `${withError(mean, error)}, ${number(records)} ${records === 1 ? "record" : "records"}`;
    const reach = Math.max(...cells.map(([, , , mean, error]) => Math.abs(mean ?? 0) + (columns ? 0 : error ?? 0))) || 1;
    const caption = element("caption", {}, `Mean score by ${headings.join(" and ")}`);
    // A group of too few episodes has no error, and says as little as one within two errors.
    const hasErrors = cells.some(([, , , , , differs]) => typeof differs === "boolean");
    const isUnsure = (differs) => hasErrors && !differs;
    const head = (texts) => element("thead", {}, element("tr", {}, ...texts.map((text) => element("th", { scope: "col" }, text))));
    if (!columns) {
      const ordered = [...cells].sort((one, other) => one[3] - other[3]);
      return element("table", { class: "bars" }, caption, head([headings[0], "mean score ± error", "", "records"]), element("tbody", {}, ...ordered.map((cell) => {
        const [row, , records, mean, error, differs] = cell;
        const end = 50 + ((mean ?? 0) / reach) * 48, half = ((error ?? 0) / reach) * 48;
        const track = element("span", { class: "track", "aria-hidden": "true" },
          element("span", { class: `bar ${mean < 0 ? "low" : "high"}`, style: `left:${Math.min(50, end)}%;width:${Math.abs(end - 50)}%` }),
          element("span", { class: "whisker", style: `left:${end - half}%;width:${2 * half}%` }));
        return element("tr", { class: classes(isUnsure(differs) && "unsure", isNamed(rows[row]) && "named") }, element("th", { scope: "row" }, pick(cell, `${show(rows[row], 0)}: ${say(cell)}`, show(rows[row], 0))),
          element("td", { class: "wide" }, track), element("td", {}, withError(mean, error)), element("td", {}, number(records)));
      })));
    }
    const colours = Whence.palette();
    const at = new Map(cells.map((cell) => [`${cell[0]}/${cell[1]}`, cell]));
    const body = rows.map((name, row) => element("tr", {}, element("th", { scope: "row" }, show(name, 0)), ...columns.map((other, column) => {
      const cell = at.get(`${row}/${column}`);
      if (!cell) return element("td", { class: "none" }, "–");
      const [, , records, mean, error, differs] = cell;
      const tone = isUnsure(differs) ? "" : `--tone:${colours[Whence.level(mean, reach)]}`;
      return element("td", { class: classes(isUnsure(differs) && "unsure", isNamed(name, other) && "named"), style: tone }, pick(cell, `${show(name, 0)}, ${show(other, 1)}: ${say(cell)}`, element("b", {}, withError(mean, error)), element("small", {}, number(records))));
    })));
    return element("table", { class: "pivot" }, caption, head([headings.join(" \\ "), ...columns.map((name) => show(name, 1))]), element("tbody", {}, ...body));
  }

  // What stands out in a run, what is wrong first. `onOpen(place)` shows the round, the groups and the records of one.
  function findings(list, run, onOpen) {
    const first = ({ round, records }, place) => element("a", { href: `#run=${run}&round=${round}&record=${records[0]}&finding=${place + 1}` }, `Open the first ${Whence.language ? "response" : "moment"}`);
    const some = ({ total, of, round }) => `${total === 1 ? "the one" : `the ${number(total)}`} of ${isNumber(of) ? `${number(of)} ` : ""}${Whence.one}s in round ${number(round)} that show${total === 1 ? "s" : ""} it`;
    return list.map((finding, place) => element("li", {},
      element("h3", {}, element("b", { class: `rank ${finding.rank}` }, finding.rank), " ", ...Whence.withCode(finding.title)),
      finding.evidence ? element("p", {}, ...Whence.withCode(finding.evidence)) : null,
      finding.advice ? element("p", { class: "do" }, ...Whence.withCode(finding.advice)) : null,
      isNumber(finding.round) ? element("button", { type: "button", class: "quiet", onclick: () => onOpen(place) },
        finding.total ? `Show ${some(finding)}` : `Open round ${number(finding.round)}`) : null,
      finding.records?.length ? first(finding, place) : null));
  }

  // Fills what is folded: what was looked at in a run, by what came of it. Where that is nothing, the reasons are open.
  function showLooked(details, { checks, counts }) {
    const outcomes = [...new Set(checks.map(({ outcome }) => outcome))];
    const [summary, body] = details.children;
    details.hidden = !checks.length;
    details.open ||= outcomes.every((outcome) => outcome === "could not be looked at");
    summary.textContent = `What was looked at: ${counts}`;
    body.replaceChildren(...outcomes.flatMap((outcome) => [
      element("h3", { class: "outcome" }, outcome),
      element("ul", {}, ...checks.filter((check) => check.outcome === outcome).map(({ name, text }) =>
        element("li", {}, element("b", {}, name), " ", ...Whence.withCode(text))))]));
  }

  function trust(lines) {
    const WORDS = { fair: "With care" };
    return element("ul", { class: "trust", "aria-label": "How far to trust the scores" },
      ...lines.map(({ level, text }) => element("li", { class: level }, WORDS[level] ? element("b", {}, `${WORDS[level]} `) : null, ...Whence.withCode(text))));
  }

  return { moments, pivot, findings, showLooked, trust };
})();
