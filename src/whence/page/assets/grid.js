// The grid of all records: sorts, filters and searches here, or asks the server to.
Whence.makeGrid = (parts) => {
  "use strict";

  const { holder, search, where, scope, note, pages, differs, flagged, flagging, all, onOpen } = parts;
  const { element, isNumber, language, number, signed, id, source } = Whence;
  const SIZE = 25;
  const ROUND = { key: "round", name: "round", about: "", kind: "number" }; // a column where all rounds are searched
  const [flagNote, flagAll] = flagging.children;
  // A table is built when its first rows are there; what is looked for meanwhile comes late.
  let table = null, built = false, late = false, shown = "", actions = null, picked = {}, named = new Set(); // {groups: [[column, name]], ids, words}
  let current = []; // what is shown: run, its index, round, named records
  let lastQuery = "", news = ""; // the last query; what was flagged by it
  let answer = null; // the server's, until its rows stand in the table

  function text(value, column) {
    if (value === null || value === undefined) return column.kind === "reason" ? "" : "–";
    if (column.kind === "keep") return value === true || value === "kept" || value === 1 ? "kept" : "dropped";
    if (column.key === "record_id") return id(value);
    if (column.key === "action") return Whence.nameAction(value, actions);
    if (isNumber(value)) return column.kind === "score" ? signed(value) : number(value, 4);
    return String(value);
  }

  function formatter(column, scale) {
    return (cell) => {
      const value = cell.getValue();
      const words = text(value, column);
      if (column.key === "record_id") {
        return element("button", { type: "button", class: "link", "aria-label": `Open ${Whence.one} ${words}`, onclick: (event) => { event.stopPropagation(); onOpen(value, event.currentTarget, cell.getData().round); } }, words);
      }
      const node = element("span", words.length > 60 ? { title: words } : {}, words.length > 60 ? `${words.slice(0, 59)}…` : words);
      if (column.kind === "score" && isNumber(value)) {
        node.className = "score-cell";
        node.style.setProperty("--tone", Whence.palette()[Whence.level(value, scale)]);
      }
      if (column.kind === "keep" && words === "dropped") node.className = "dropped";
      return node;
    };
  }

  // As the server reads filters: "<-0.1" compares, "kept" and "dropped" choose, other text is contained.
  function matches(wanted, value, column) {
    wanted = String(wanted ?? "").trim().toLowerCase();
    if (!wanted) return true;
    const comparison = /^(<=|>=|<|>|=)\s*([-−+]?[\d.]+(?:e[-+]?\d+)?)$/.exec(wanted);
    if (comparison) {
      if (!isNumber(value)) return false;
      const limit = Number(comparison[2].replace("−", "-"));
      return { "<": value < limit, ">": value > limit, "<=": value <= limit, ">=": value >= limit, "=": value === limit }[comparison[1]];
    }
    if (isNumber(value) && /^[-−+]?[\d.]+$/.test(wanted)) return String(value).startsWith(wanted.replace("−", "-")) || number(value, 4) === wanted;
    return text(value, column).toLowerCase().includes(wanted);
  }

  // On a narrow screen columns are narrower, and rewards stand next to the response's number; the environment, if there
  // are several, next to a record's.
  const narrow = matchMedia("(max-width: 600px)").matches;
  const isEarly = ({ key }) => (language ? key === "reward" || key.startsWith("reward.") : key === "env_index" && Whence.several);
  const order = ([first, ...others]) => (narrow ? [first, ...others.filter(isEarly), ...others.filter((one) => !isEarly(one))] : [first, ...others]);

  function columnsOf(columns, scale) {
    return order(columns).map((column) => {
      const numeric = !["text", "reason", "keep"].includes(column.kind);
      return {
        field: column.key,
        title: column.key,
        titleFormatter: () => element("span", column.about ? { title: column.about } : {}, column.name),
        formatter: formatter(column, scale),
        hozAlign: numeric ? "right" : "left",
        headerHozAlign: numeric ? "right" : "left",
        minWidth: column.kind === "text" && !["flag", "end"].includes(column.key) ? 180 : narrow ? 72 : column.key === "record_id" ? 96 : 84,
        maxInitialWidth: 320,
        // What is missing comes last in either direction.
        sorter: (one, other, _a, _b, _c, direction) => {
          const missing = (value) => value === null || value === undefined;
          if (missing(one) || missing(other)) return (missing(one) - missing(other)) * (direction === "asc" ? 1 : -1);
          return isNumber(one) && isNumber(other) ? one - other : String(one).localeCompare(String(other), undefined, { numeric: true });
        },
        headerFilter: "input",
        headerFilterFunc: (wanted, value) => matches(wanted, value, column),
        headerFilterPlaceholder: numeric ? "e.g. <0" : column.kind === "keep" ? "kept" : "text",
        headerFilterParams: { elementAttributes: { "aria-label": `Filter ${column.name}` } },
      };
    });
  }

  function tell(rows, count, left = []) {
    const words = news + (picked.words ? `${picked.words}: ` : "");
    const held = source.served ? count : table?.getData().length ?? 0;
    const [run, , round] = current;
    const place = `${Whence.one}s of ${scope.value ? `${number(run.rounds.length)} rounds` : `round ${number(round.round)}`}`;
    note.textContent = held === count ? `${words}${number(rows)} of the ${number(count)} ${place}.`
      : `${words}${number(rows)} of the ${number(held)} ${place} that this file holds, of ${number(count)}: those of findings, flags and the listed ${language ? "responses" : "moments"} first. whence view shows all.`;
    if (left.length) note.textContent += ` Rounds that lack what is searched, such as stored scores, are left out: ${number(left.length)}.`;
    if (picked.words) note.textContent += " Another round shows all again.";
    news = "";
    flagging.hidden = !source.served || !rows || rows === count;
    flagNote.hidden = flagged.checked;
    flagAll.textContent = flagged.checked ? `Remove these ${number(rows)} flags` : `⚑ Flag these ${number(rows)} ${Whence.one}s`;
  }

  function show(run, runIndex, round, marked) {
    const key = `${runIndex}/${scope.value || round.round}`;
    named = marked;
    current = [run, runIndex, round, marked];
    if (shown === key) return void (built && table.redraw(true));
    // What the reader filters and sorts by stays from round to round; groups and ids are of one round.
    const isSameRun = shown.startsWith(`${runIndex}/`);
    const isSameScope = shown.endsWith("/all") === Boolean(scope.value);
    const [filters, sorters] = isSameRun && built ? [table.getHeaderFilters(), isSameScope ? table.getSorters() : []] : [[], []];
    shown = key;
    actions = run.actions;
    table?.destroy();
    built = late = false;
    pages.replaceChildren();
    if (!isSameRun) {
      search.value = where.value = "";
      differs.checked = flagged.checked = false;
    }
    differs.parentElement.hidden = !run.columns.some(({ key: name }) => name === "error");
    pick({}, false);
    const columns = columnsOf(scope.value ? [ROUND, ...run.columns] : run.columns, Whence.colourScale(round.strip.scores));
    const scored = run.columns.some(({ kind, key: name }) => kind === "score" && name) && round.scored;
    const first = run.columns.find(({ kind }) => kind === "score")?.key;
    const options = {
      columns, nestedFieldSeparator: false, layout: "fitDataStretch", height: 470, autoResize: false, pagination: true, paginationSize: SIZE, paginationElement: pages,
      placeholder: `No ${Whence.one} fits.`, initialHeaderFilter: filters.flatMap(({ field, value }) => (field !== ROUND.key || scope.value ? { field, value } : [])),
      initialSort: sorters.length ? sorters.map(({ field, dir }) => ({ column: field, dir })) : scored && first && !scope.value ? [{ column: first, dir: "asc" }] : [],
      rowFormatter: (row) => row.getElement().classList.toggle("named", named.has(row.getData().record_id)),
      columnDefaults: { headerSortTristate: false }, headerFilterLiveFilterDelay: 250,
      ...(source.served ? remote(runIndex, round, key) : scope.value ? embedded(runIndex) : { data: round.rows ?? [] }),
    };
    table = new Tabulator(holder, options);
    const mine = table;
    mine.on("rowClick", (_event, row) => onOpen(row.getData().record_id, row.getElement().querySelector("button"), row.getData().round));
    mine.on("tableBuilt", amend);
    mine.on("tableBuilt", () => {
      built = true;
      if (late || picked.words || !source.served) filter();
    });
    // The count is told after the rows are drawn; a click before that would hit a row that is replaced.
    mine.on("dataProcessed", () => {
      if (mine !== table || !answer) return;
      tell(answer.last_row, answer.records, answer.left_out);
      answer = null;
    });
    if (!source.served) mine.on("dataFiltered", (_filters, rows) => { if (mine === table) tell(rows.length, scope.value ? records : round.records); });
  }

  let records = 0; // of all rounds that a file holds
  const embedded = (runIndex) => ({
    ajaxURL: "#", dataLoader: false,
    ajaxRequestFunc: async () => {
      const all = await source.loadRows(runIndex);
      records = all.records;
      return all.rows;
    },
  });

  // Tabulator listens to keys only, makes a box focusable whose buttons already are, and lets the page name the grid.
  function amend() {
    for (const heading of holder.querySelectorAll(".tabulator-col.tabulator-sortable")) {
      heading.setAttribute("tabindex", "0");
      heading.addEventListener("keydown", (event) => {
        if (event.target !== heading || (event.key !== "Enter" && event.key !== " ")) return;
        event.preventDefault();
        heading.querySelector(".tabulator-col-title").click();
      });
    }
    holder.setAttribute("aria-label", `${Whence.One}s`);
    holder.querySelector(".tabulator-tableholder")?.removeAttribute("tabindex");
    for (const input of holder.querySelectorAll(".tabulator-header-filter input")) {
      input.setAttribute("autocomplete", "off");
      input.addEventListener("input", () => input.dispatchEvent(new KeyboardEvent("keyup")));
    }
  }

  function remote(runIndex, round, key) {
    return {
      ajaxURL: "/api/", sortMode: "remote", filterMode: "remote", paginationMode: "remote", dataLoader: false,
      ajaxRequestFunc: async (_address, _config, params) => {
        const query = new URLSearchParams({ page: params.page ?? 1, size: params.size ?? SIZE });
        const [sort] = params.sort ?? [];
        if (sort) { query.set("sort", sort.field); query.set("dir", sort.dir); }
        for (const [name, { value }] of Object.entries({ search, where })) if (value.trim()) query.set(name, value.trim());
        for (const { field, value } of params.filter ?? []) query.append("filter", `${encodeURIComponent(field)}:${value}`);
        for (const group of picked.groups ?? []) query.append("group", group.map(encodeURIComponent).join(":"));
        if (picked.ids) query.set("ids", picked.ids.join(","));
        if (differs.checked) query.append("only", "differs");
        if (flagged.checked) query.append("only", "flagged");
        lastQuery = query.toString();
        try {
          const page = await source.loadRecords(runIndex, scope.value ? null : round.round, lastQuery);
          // A table that is gone takes no answer.
          if (shown !== key) return await new Promise(() => {});
          return (answer = page);
        } catch (error) {
          if (shown !== key) return await new Promise(() => {});
          answer = null;
          note.textContent = error.message;
          flagging.hidden = true;
          return { data: [], last_page: 1, last_row: 0 };
        }
      },
    };
  }

  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(filter, 200);
  });
  for (const box of [differs, flagged, where]) box.addEventListener("change", filter);
  scope.addEventListener("change", () => show(...current));
  all.addEventListener("click", () => pick({}));

  function filter() {
    if (!built) return void (late = true);
    if (source.served) return void table.setPage(1);
    const wanted = search.value.trim().toLowerCase();
    const [{ columns }] = current;
    table.setFilter((row) => (!differs.checked || row.differs) && (!flagged.checked || row.flag) && (!picked.ids || picked.ids.includes(row.record_id))
      && (picked.groups ?? []).every(([column, name]) => row.groups?.[column] === name)
      && (!wanted || columns.some((column) => text(row[column.key], column).toLowerCase().includes(wanted))));
  }

  // Flags what the grid shows, or takes its flags away; the server searches again by the same query.
  flagAll.addEventListener("click", async () => {
    const [, runIndex, round] = current;
    flagAll.disabled = true;
    try {
      const written = await source.saveFlags(runIndex, scope.value ? null : round.round, lastQuery, flagged.checked ? null : flagNote.value.trim());
      news = `${number(written.records)} flags ${flagged.checked ? "removed" : "set"}. `;
    } catch (error) {
      news = `Not saved: ${error.message} `;
    }
    flagAll.disabled = false;
    refresh();
  });

  // Flags of all rounds with their notes, a line of JSON each.
  async function exportFlags() {
    const { flags } = await source.loadFlags(current[1]).catch((error) => { note.textContent = error.message; return {}; });
    if (!flags?.length) return void (note.textContent = flags ? `Nothing is flagged in this run. Open a ${Whence.one} to flag it.` : note.textContent);
    const file = new Blob(flags.map((flag) => `${JSON.stringify(flag)}\n`), { type: "application/jsonl" });
    const link = element("a", { href: URL.createObjectURL(file), download: "flags.jsonl" });
    link.click();
    URL.revokeObjectURL(link.href);
    note.textContent = `flags.jsonl holds ${number(flags.length)} flagged ${Whence.one}${flags.length > 1 ? "s" : ""} of all rounds.`;
  }
  document.getElementById("grid-export").addEventListener("click", exportFlags);

  // Shows the records of some groups, or those of some ids; {} shows all.
  function pick(wanted, anew = true) {
    if (wanted.words && scope.value) {
      scope.value = "";
      show(...current);
    }
    picked = wanted;
    all.hidden = !picked.words;
    if (anew) filter();
  }

  const refresh = () => { if (source.served) table?.setPage(table.getPage()); };

  // Left to itself, the table also draws itself anew when it is scrolled to, and a click just then is lost.
  window.addEventListener("resize", () => built && table.redraw());

  return { show, pick, refresh };
};
