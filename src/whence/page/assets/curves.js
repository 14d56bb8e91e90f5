// Rewards, values, advantages and scores around a moment, one above the other, with one cursor through all.
Whence.makeCurves = (window, face, onStep) => {
  "use strict";

  const { element, drawing, isNumber, number } = Whence;
  // On a narrow screen the drawing is as narrow, so that its words stay legible.
  const WIDTH = document.documentElement.clientWidth < 600 ? 380 : 640, HEIGHT = 58, LABEL = 88, RIGHT = 10;
  const n = window.record_ids.length;
  const x = (place) => LABEL + ((place + 0.5) / n) * (WIDTH - LABEL - RIGHT);
  const rows = [
    { name: "reward", values: window.rewards },
    { name: "value V", values: window.values },
    { name: "advantage", values: window.advantages, zero: true },
    { name: "score", values: window.scores, errors: window.errors, zero: true },
  ].filter(({ values }) => values?.some(isNumber));
  const bottom = rows.length * HEIGHT + 20;
  const svg = drawing("svg", { viewBox: `0 0 ${WIDTH} ${bottom}`, class: "curves", role: "img" });
  svg.setAttribute("aria-label", `${rows.map((row) => row.name).join(", ")} over ${n} steps around the moment`);
  const scale = Whence.colourScale(window.scores ?? []);

  rows.forEach(({ name, values, errors, zero }, row) => {
    const top = row * HEIGHT + 6, height = HEIGHT - 14;
    const reach = values.map((value, place) => [value, isNumber(errors?.[place]) ? errors[place] : 0]).filter(([value]) => isNumber(value));
    let low = Math.min(...reach.map(([value, error]) => value - error), ...(zero ? [0] : []));
    let high = Math.max(...reach.map(([value, error]) => value + error), ...(zero ? [0] : []));
    const ends = [low, high];
    if (high - low < 1e-12) [low, high] = [low - 1, high + 1];
    const y = (value) => top + height - ((value - low) / (high - low)) * height;
    svg.append(drawing("text", { x: 0, y: top + height / 2 + 4, class: "name" }, name));
    svg.append(drawing("text", { x: LABEL - 8, y: top + 8, class: "end" }, number(ends[1], 2)));
    if (ends[0] !== ends[1]) svg.append(drawing("text", { x: LABEL - 8, y: top + height + 2, class: "end" }, number(ends[0], 2)));
    if (low <= 0 && high >= 0) svg.append(drawing("line", { x1: LABEL, x2: WIDTH - RIGHT, y1: y(0), y2: y(0), class: "zero" }));
    if (name === "value V") {
      const points = values.flatMap((value, place) => (isNumber(value) ? [`${x(place)},${y(value)}`] : []));
      svg.append(drawing("polyline", { points: points.join(" "), class: "line" }));
      return;
    }
    const colours = Whence.palette();
    values.forEach((value, place) => {
      if (!isNumber(value)) return;
      const width = Math.max(2, ((WIDTH - LABEL - RIGHT) / n) * 0.62);
      const base = y(Math.min(high, Math.max(low, 0)));
      const bar = { x: x(place) - width / 2, width, y: Math.min(base, y(value)), height: Math.max(1, Math.abs(base - y(value))), class: "bar" };
      const node = drawing("rect", bar);
      if (name === "score") node.style.fill = colours[Whence.level(value, scale)];
      svg.append(node);
      if (isNumber(errors?.[place])) {
        const [from, to] = [y(value - errors[place]), y(value + errors[place])];
        svg.append(drawing("line", { x1: x(place), x2: x(place), y1: from, y2: to, class: "error" }));
      }
    });
  });
  window.dropped?.forEach((dropped, place) => {
    if (dropped) svg.append(drawing("rect", { x: x(place) - 3, y: bottom - 16, width: 6, height: 2.5, class: "drop" }));
  });
  if (window.dropped?.some(Boolean)) svg.append(drawing("text", { x: 0, y: bottom - 11, class: "name" }, "dropped"));
  svg.append(drawing("line", { x1: x(face), x2: x(face), y1: 0, y2: bottom - 16, class: "face" }));
  const cursor = drawing("line", { y1: 0, y2: bottom - 4, class: "cursor" });
  svg.append(cursor);

  const pick = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    onStep(Math.max(0, Math.min(n - 1, Math.floor(((at - LABEL) / (WIDTH - LABEL - RIGHT)) * n))));
  };
  svg.addEventListener("pointerdown", pick);
  svg.addEventListener("pointermove", (event) => { if (event.buttons) pick(event); });

  return {
    node: element("div", { class: "curves-frame" }, svg),
    show(place) {
      cursor.setAttribute("x1", x(place));
      cursor.setAttribute("x2", x(place));
    },
  };
};
