// The table of records: choose a run and a round, sort by a column, filter by text.
// All text goes in by textContent, so that none of it is taken for markup.
(() => {
  "use strict";

  const SHOWN = 48; // characters in a cell; the rest stands in its title

  const { columns: COLUMNS, runs } = JSON.parse(document.getElementById("records-data").textContent);
  const place = (kind) => COLUMNS.findIndex((column) => column.kind === kind);
  const SCORE = place("score"), KEPT = place("keep"), REASON = place("reason");
  const [runSelect, roundSelect, filter, table, note] = ["run", "round", "filter", "table", "note"].map((name) =>
    document.getElementById(`records-${name}`),
  );
  const collator = new Intl.Collator(undefined, { numeric: true });
  const sort = { column: SCORE, descending: false };

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  function textOf(value, column) {
    if (value === null) return column === REASON ? "" : "–";
    if (column === KEPT) return value ? "kept" : "dropped";
    return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(4))) : String(value);
  }

  // Nothing comes last in either direction; numbers come before text such as "nan".
  function compare(one, other, descending) {
    if (one === null || other === null) return (one === null) - (other === null);
    if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
    const order = typeof one === "string" ? collator.compare(one, other) : one - other;
    return descending ? -order : order;
  }

  function headings() {
    const row = document.createElement("tr");
    COLUMNS.forEach(({ name, about }, column) => {
      const heading = element("th", "", { scope: "col", class: isText(column) ? "text" : "" });
      const button = element("button", name, { type: "button", title: about });
      button.addEventListener("click", () => {
        sort.descending = sort.column === column && !sort.descending;
        sort.column = column;
        show();
      });
      heading.append(button);
      row.append(heading);
    });
    table.tHead.replaceChildren(row);
  }

  const isText = (column) => column === REASON || COLUMNS[column].kind === "text";

  function cell(value, column, largest) {
    const text = textOf(value, column);
    const long = text.length > SHOWN;
    const made = element("td", long ? `${text.slice(0, SHOWN - 1)}…` : text, long ? { title: text } : {});
    if (isText(column)) made.className = "text";
    if (column === KEPT && value === false) made.className = "dropped";
    if (column === SCORE && typeof value === "number" && largest > 0) {
      made.className = "score";
      made.style.setProperty("--share", `${(100 * Math.abs(value)) / largest}%`);
      made.style.setProperty("--tone", value < 0 ? "var(--low)" : "var(--high)");
    }
    return made;
  }

  function show() {
    const round = runs[runSelect.value].rounds[roundSelect.value];
    const wanted = filter.value.trim().toLowerCase();
    const has = (row) => row.some((value, column) => textOf(value, column).toLowerCase().includes(wanted));
    const rows = round.rows.filter(has);
    rows.sort((one, other) => compare(one[sort.column], other[sort.column], sort.descending));
    const largest = Math.max(...round.rows.map((row) => Math.abs(row[SCORE]) || 0));
    const shown = rows.map((row) => {
      const made = document.createElement("tr");
      made.append(...row.map((value, column) => cell(value, column, largest)));
      return made;
    });
    if (!shown.length) {
      const empty = document.createElement("tr");
      empty.append(element("td", "No record has this text.", { class: "none", colspan: COLUMNS.length }));
      shown.push(empty);
    }
    table.tBodies[0].replaceChildren(...shown);
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      if (column === sort.column) heading.setAttribute("aria-sort", sort.descending ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    });
    note.textContent = about(round, rows.length);
  }

  function about(round, shown) {
    const all = round.records.toLocaleString("en");
    const which = round.rows.length === round.records ? `All ${all} records` : round.scored
      ? `The ${round.rows.length / 2} lowest and the ${round.rows.length / 2} highest scores of ${all} records`
      : `The first ${round.rows.length} of ${all} records`;
    const unscored = round.scored ? "" : " Nothing was scored in this round: the rule needs no influence.";
    const filtered = shown === round.rows.length ? "" : ` The filter leaves ${shown}.`;
    return `${which} of round ${round.round}.${unscored}${filtered}`;
  }

  // Another run opens at the round that was shown, or at its last.
  function showRounds(number) {
    const rounds = runs[runSelect.value].rounds;
    roundSelect.replaceChildren(...rounds.map((round, at) => element("option", round.round, { value: at })));
    const same = rounds.findIndex((round) => round.round === number);
    roundSelect.value = same >= 0 ? same : rounds.length - 1;
    show();
  }

  runSelect.addEventListener("change", () => showRounds(Number(roundSelect.selectedOptions[0].textContent)));
  roundSelect.addEventListener("change", show);
  filter.addEventListener("input", show);
  const scored = runs.findIndex((run) => run.rounds.some((round) => round.scored));
  runSelect.value = Math.max(scored, 0);
  headings();
  showRounds();
})();
