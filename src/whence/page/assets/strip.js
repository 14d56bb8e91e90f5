// The influence strip: every record of a round in time order, a cell in the colour of its score.
Whence.makeStrip = (onOpen) => {
  "use strict";

  const { element, isNumber, number, signed, id } = Whence;
  const GAP = 3, ROWS = 26, MOST_CELL = 16;
  const canvas = element("canvas", {
    class: "strip", tabindex: 0, role: "slider", "aria-label": Whence.language ? "Score of each response, by prompts" : "Influence of each record, in time order", "aria-valuemin": 0,
  });
  const readout = element("p", { class: "readout" });
  const caption = element("p", { class: "caption" });
  const HINT = `Point at a cell, or focus the strip and use the arrow keys. Click or Enter opens the ${Whence.language ? "response" : "moment"}.`;
  let strip = null, segments = [], rowHeight = 14, scale = 1, cursor = -1, opened = -1, hovering = false, order = new Map(), named = new Set();

  // Episodes stand in rows of their own; where they are many, one after another, wrapped like words.
  function arrange(width) {
    const { episodes } = strip;
    const total = strip.record_ids.length;
    const longest = Math.max(1, ...episodes.map((episode) => episode.length));
    segments = [];
    const rowed = episodes.length > 1 && episodes.length <= ROWS && total / (episodes.length * longest) > 0.2;
    caption.textContent = Whence.language ? `A cell is a response. ${rowed ? "A row holds those to one prompt." : "Those to one prompt stand together."}` : `A cell is a record, in the order of time. ${rowed ? "A row is an episode." : "Episodes follow one another, with a gap between."}`;
    if (rowed) {
      const cell = Math.min(MOST_CELL, width / longest);
      episodes.forEach((episode, row) => segments.push({ ...episode, row, x: 0, cell }));
    } else {
      const rows = Math.max(1, Math.min(ROWS, Math.ceil((total * 5) / width)));
      const gaps = Math.min(GAP, (0.3 * width * rows) / Math.max(1, episodes.length));
      const cell = Math.min(MOST_CELL, Math.max(1e-6, (width * rows - gaps * episodes.length) / Math.max(1, total)));
      let x = 0, row = 0;
      for (const episode of episodes) {
        let { start, length } = episode;
        while (length > 0) {
          const room = Math.max(0, Math.floor((width - x) / cell + 1e-6));
          if (room === 0) { x = 0; row += 1; if (cell > width) break; continue; }
          const part = Math.min(room, length);
          segments.push({ ...episode, start, length: part, row, x, cell });
          start += part; length -= part; x += part * cell;
        }
        x += gaps;
      }
    }
    const rows = segments.length ? segments.at(-1).row + 1 : 1;
    rowHeight = Math.max(9, Math.min(22, Math.floor(330 / rows)));
    return rows * rowHeight;
  }

  function draw() {
    if (!strip) return;
    const width = canvas.parentElement?.clientWidth || 0;
    if (!width) return;
    const height = arrange(width);
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const colours = Whence.palette();
    const ink = Whence.colour("--ink");
    for (const segment of segments) drawSegment(context, segment, colours, ink);
    for (const record of named) if (order.has(record)) flag(context, order.get(record));
    for (const [place, width] of [[opened, 2], [cursor, 2]]) if (place >= 0) mark(context, place, ink, width);
  }

  // Where cells are narrower than a pixel a column shows the largest of its scores.
  function drawSegment(context, { start, length, row, x, cell }, colours, ink) {
    const [top, height] = [row * rowHeight, rowHeight - 3];
    const columns = cell >= 1 ? length : Math.max(1, Math.ceil(length * cell));
    const edge = cell >= 4 ? 1 : cell >= 2.5 ? 0.5 : 0;
    for (let column = 0; column < columns; column += 1) {
      const first = start + Math.floor((column * length) / columns);
      const end = Math.max(first + 1, start + Math.floor(((column + 1) * length) / columns));
      let score = 0, dropped = 0;
      for (let place = first; place < end; place += 1) {
        if (Math.abs(strip.scores[place] ?? 0) > Math.abs(score)) score = strip.scores[place];
        dropped += strip.dropped[place];
      }
      const step = (length * cell) / columns;
      context.fillStyle = colours[Whence.level(score, scale)];
      context.fillRect(x + column * step, top, Math.max(0.6, step - edge), height);
      if (2 * dropped >= end - first && dropped) {
        context.fillStyle = ink;
        context.fillRect(x + column * step, top + height - 2, Math.max(0.6, step - edge), 2);
      }
    }
  }

  function segmentOf(place) {
    return segments.find(({ start, length }) => start <= place && place < start + length);
  }

  // What a finding names has a bar on top, so that its score's colour stays.
  function flag(context, place) {
    const { x, start, row, cell } = segmentOf(place);
    context.fillStyle = Whence.colour("--link");
    context.fillRect(x + (place - start) * cell, row * rowHeight - 1, Math.max(1.5, cell), 4);
  }

  function mark(context, place, ink, width) {
    const segment = segmentOf(place);
    if (!segment) return;
    const size = Math.max(6, segment.cell + 2);
    const left = segment.x + (place - segment.start + 0.5) * segment.cell - size / 2;
    context.strokeStyle = ink;
    context.lineWidth = width;
    context.strokeRect(Math.max(1, left), segment.row * rowHeight + 0.5, size, rowHeight - 3);
  }

  function describe(place) {
    const episode = strip.episodes.find(({ start, length }) => start <= place && place < start + length);
    const parts = [`${Whence.One} ${id(strip.record_ids[place])}`];
    if (episode && isNumber(episode.id) && !Whence.language) {
      const step = isNumber(episode.first_step) ? `, step ${number(episode.first_step + place - episode.start)}` : "";
      const env = Whence.several ? ` of environment ${id(episode.env)}` : "";
      parts.push(`episode ${id(episode.id)}${env}${step}${isNumber(episode.return) ? ` (rewards sum to ${number(episode.return)})` : ""}`);
    }
    const score = strip.scores[place];
    parts.push(isNumber(score) ? `score ${signed(score)}` : "not scored");
    if (strip.dropped[place]) parts.push("dropped");
    return parts.join(" · ");
  }

  function point(place) {
    cursor = place;
    readout.textContent = place < 0 ? HINT : describe(place);
    const n = strip?.record_ids.length ?? 0;
    canvas.setAttribute("aria-valuemax", Math.max(0, n - 1));
    canvas.setAttribute("aria-valuenow", Math.max(0, place));
    canvas.setAttribute("aria-valuetext", place < 0 ? `${number(n)} ${Whence.one}s` : describe(place));
    draw();
  }

  function placeAt(event) {
    const box = canvas.getBoundingClientRect();
    const [x, row] = [event.clientX - box.left, Math.floor((event.clientY - box.top) / rowHeight)];
    const segment = segments.find((one) => one.row === row && one.x <= x && x < one.x + one.length * one.cell);
    return segment ? segment.start + Math.min(segment.length - 1, Math.floor((x - segment.x) / segment.cell)) : -1;
  }

  function rowAway(rows) {
    const segment = segmentOf(cursor);
    if (!segment) return cursor;
    const x = segment.x + (cursor - segment.start) * segment.cell;
    const others = segments.filter((one) => one.row === segment.row + rows);
    const other = others.findLast((one) => one.x <= x) ?? others[0];
    return other ? other.start + Math.max(0, Math.min(other.length - 1, Math.round((x - other.x) / other.cell))) : cursor;
  }

  canvas.addEventListener("pointermove", (event) => { hovering = true; point(placeAt(event)); });
  canvas.addEventListener("pointerleave", () => { hovering = false; point(-1); });
  canvas.addEventListener("blur", () => { if (!hovering) point(-1); });
  canvas.addEventListener("click", (event) => {
    const place = placeAt(event);
    if (place >= 0) onOpen(strip.record_ids[place], canvas);
  });
  canvas.addEventListener("keydown", (event) => {
    const last = (strip?.record_ids.length ?? 0) - 1;
    if (last < 0) return;
    const moves = {
      ArrowRight: () => Math.min(last, cursor + 1), ArrowLeft: () => Math.max(0, cursor - 1), Home: () => 0, End: () => last,
      ArrowDown: () => (cursor < 0 ? 0 : rowAway(1)), ArrowUp: () => (cursor < 0 ? 0 : rowAway(-1)),
      PageDown: () => Math.min(last, cursor + 50), PageUp: () => Math.max(0, cursor - 50),
    };
    if (event.key in moves) point(moves[event.key]());
    else if ((event.key === "Enter" || event.key === " ") && cursor >= 0) onOpen(strip.record_ids[cursor], canvas);
    else return;
    event.preventDefault();
  });

  const legend = element("p", { class: "legend" },
    element("span", { class: "ramp", "aria-hidden": "true" }),
    "harmful to helpful",
    element("span", { class: "dropped-mark" }, element("span", { class: "mark", "aria-hidden": "true" }), "dropped: did not train"),
  );
  const frame = element("div", { class: "strip-frame" }, canvas);
  new ResizeObserver(draw).observe(frame);
  Whence.dark.addEventListener("change", draw);

  return {
    nodes: [caption, frame, element("div", { class: "strip-foot" }, readout, legend)],
    show(round, marked) {
      [strip, named] = [round.strip, marked];
      scale = Whence.colourScale(strip.scores);
      legend.hidden = !round.scored;
      order = new Map(strip.record_ids.map((record, place) => [record, place]));
      opened = -1;
      point(-1);
    },
    open(record) { opened = order.get(record) ?? -1; draw(); },
  };
};
