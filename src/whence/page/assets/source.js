// Where rounds and moments come from: embedded in this file and decoded when asked for, or from the server.
Whence.source = (() => {
  "use strict";

  const page = JSON.parse(document.getElementById("page-data").textContent);
  const served = page.mode === "served";
  const REMEMBERED = 8; // rounds
  const cache = new Map();

  async function fetchJson(address, options = {}) {
    let response;
    try {
      response = await fetch(address, { headers: { Accept: "application/json" }, ...options });
    } catch {
      throw Object.assign(new Error("The server does not answer."), { gone: true });
    }
    const body = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(body.error || `The server answered ${response.status}.`);
    return body;
  }

  async function decode(run, round) {
    const script = document.getElementById(`round-${run}-${round}`);
    if (!script) throw new Error(`Round ${round} is not in this file.`);
    const content = await Packed.unpack(script.textContent).json();
    let record = 0;
    content.round.strip.record_ids = content.round.strip.record_ids.map((change) => (record += change));
    return content;
  }

  // The promise of {round, details, pivots}; the last few are remembered.
  function load(run, round) {
    const key = `${run}/${round}`;
    let promise = cache.get(key);
    cache.delete(key);
    promise ??= served
      ? fetchJson(`/api/runs/${run}/rounds/${round}`).then((body) => ({ round: body, details: null }))
      : decode(run, round);
    cache.set(key, promise);
    promise.catch(() => cache.delete(key));
    if (cache.size > REMEMBERED) cache.delete(cache.keys().next().value);
    return promise;
  }

  async function loadDetail(run, round, record) {
    if (served) return fetchJson(`/api/runs/${run}/rounds/${round}/records/${record}`);
    const content = await load(run, round);
    const detail = content.details[record];
    if (!detail) throw new Error(`${Whence.One} ${record} cannot be opened in this file. The command ${page.runs[run].commands.view} opens any record.`);
    return { ...detail, group: findGroup(content, Number(record)) };
  }

  // The file holds the responses to a prompt once, and those that open in their details.
  function findGroup({ groups, details }, record) {
    const group = groups?.find(({ responses }) => responses.some((one) => one.record === record));
    const complete = (one) => (details[one.record] ? { ...one, response: details[one.record].response } : one);
    return group && { ...group, responses: group.responses.map(complete) };
  }

  // Groups by one column or two, whichever of them comes first in the file.
  async function loadPivot(run, round, by) {
    if (served) return fetchJson(`/api/runs/${run}/rounds/${round}/pivot?${new URLSearchParams(by.map((key) => ["by", key]))}`);
    const { pivots } = await load(run, round);
    const same = pivots[by.join("\n")];
    if (same) return same;
    const { rows, columns, cells } = pivots[[...by].reverse().join("\n")];
    return { rows: columns, columns: rows, cells: cells.map(([row, column, ...rest]) => [column, row, ...rest]) };
  }

  const place = (run, round) => `/api/runs/${run}${round === null ? "" : `/rounds/${round}`}`;

  // Served pages only: a page of the records that a query finds in a round, or in all where it is null.
  const loadRecords = (run, round, query) => fetchJson(`${place(run, round)}/records?${query}`);

  // Files only: the rows of all rounds that are here, and how many records these rounds have.
  async function loadRows(run) {
    const rounds = (await Promise.all(page.runs[run].rounds.map((round) => decode(run, round)))).map((content) => content.round);
    return { rows: rounds.flatMap(({ round, rows }) => rows.map((row) => ({ ...row, round }))), records: rounds.reduce((sum, { records }) => sum + records, 0) };
  }

  const loadFlags = async (run) => (served ? fetchJson(`/api/runs/${run}/flags`) : page.runs[run]);

  const loadFindings = async (run) => (served ? fetchJson(`/api/runs/${run}/findings`) : page.runs[run]);

  // Served pages only: a note flags a record, null takes the flag away.
  const write = (address, note) => fetchJson(address, { method: "PUT", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ note }) });
  const saveFlag = (run, round, record, note) => write(`${place(run, round)}/records/${record}/flag`, note);
  const saveFlags = (run, round, query, note) => write(`${place(run, round)}/flags?${query}`, note);

  // Served pages only: rollouts may take many times as long as the frames, so they are asked for apart.
  const loadAdvantage = (run, round, record) => fetchJson(`/api/runs/${run}/rounds/${round}/records/${record}/advantage`);

  // Served pages only: all rounds are scored.
  const loadCauses = (run, round, record, by) => fetchJson(`/api/runs/${run}/rounds/${round}/records/${record}/causes?by=${by}`);

  const canOpen = async (run, round, record) => served || Boolean((await load(run, round)).details[record]);

  return { page, served, load, loadDetail, loadAdvantage, loadCauses, loadPivot, loadFindings, loadFlags, loadRecords, loadRows, saveFlag, saveFlags, canOpen, fetchJson };
})();
