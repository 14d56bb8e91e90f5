// The map of a grid world: what the agent did in the records that harmed and helped the most, as arrows.
Whence.map = (() => {
  "use strict";

  const { element, drawing, number, signed, percent } = Whence;
  const SIZE = 60; // of a cell, in the drawing's units
  const STEPS = [[1, 0], [0, 1], [-1, 0], [0, -1]]; // right, down, left, up
  const DIRECTIONS = ["right", "down", "left", "up"];
  const KINDS = ["start", "goal", "hole", "wall", "lava"]; // those with a colour of their own
  const SIDES = [["worst", "most harmful"], ["best", "most helpful"]];

  const praised = (arrow) => arrow.praised >= 0.5;
  const cellName = ({ cell }, { cols }) => `row ${Math.floor(cell / cols) + 1}, column ${(cell % cols) + 1}`;
  // A MiniGrid's agent looks somewhere, and acts from there; in FrozenLake the action is the direction.
  const looks = (arrow) => arrow.direction !== null && (arrow.turn !== 0 || DIRECTIONS[arrow.direction] !== arrow.action);

  function describe(arrow, map) {
    const facing = looks(arrow) ? ` facing ${DIRECTIONS[arrow.direction]}` : "";
    return `“${arrow.action}” at ${cellName(arrow, map)}${facing}: ${number(arrow.count)} ${arrow.count === 1 ? "record" : "records"}, mean score ${signed(arrow.score)}; the advantage praised it in ${percent(arrow.praised)}`;
  }

  // The line from the middle of a cell, and where and in which direction it ends; a turn bends off.
  function trace(arrow, x, y) {
    const [dx, dy] = STEPS[arrow.direction];
    if (!arrow.turn) return { path: `M${x},${y} L${x + 17 * dx},${y + 17 * dy}`, tip: [x + 26 * dx, y + 26 * dy], heading: [dx, dy] };
    const [sx, sy] = STEPS[(arrow.direction + arrow.turn + 4) % 4];
    const [bx, by] = [x + 18 * dx, y + 18 * dy];
    return { path: `M${x},${y} Q${bx},${by} ${bx + 6 * sx},${by + 6 * sy}`, tip: [bx + 15 * sx, by + 15 * sy], heading: [sx, sy] };
  }

  function draw(arrow, map, most) {
    const x = ((arrow.cell % map.cols) + 0.5) * SIZE;
    const y = (Math.floor(arrow.cell / map.cols) + 0.5) * SIZE;
    const width = 1.5 + 4 * Math.sqrt(arrow.count / most);
    const group = drawing("g", { class: `arrow ${praised(arrow) ? "high" : "low"}` }, drawing("title", {}));
    group.firstChild.textContent = describe(arrow, map);
    if (arrow.direction === null || arrow.turn === null) {
      group.append(drawing("circle", { cx: x, cy: y, r: 2 + width }));
      return group;
    }
    const { path, tip: [tx, ty], heading: [hx, hy] } = trace(arrow, x, y);
    const [half, long] = [3 + 0.9 * width, 10];
    const corners = [[tx, ty], [tx - long * hx - half * hy, ty - long * hy + half * hx], [tx - long * hx + half * hy, ty - long * hy - half * hx]];
    group.append(drawing("path", { d: path, "stroke-width": width }), drawing("polygon", { points: corners.join(" ") }));
    return group;
  }

  function side(map, name, words) {
    const arrows = map.arrows.filter((arrow) => arrow.side === name);
    const records = arrows.reduce((sum, { count }) => sum + count, 0);
    const heading = `${number(records)} ${words} records`;
    if (!arrows.length) return element("div", { class: "map-side" }, element("h3", {}, heading));
    const svg = drawing("svg", { class: "map", viewBox: `0 0 ${map.cols * SIZE} ${map.rows * SIZE}`, role: "img", "aria-label": `The ${heading} on the map; the table below lists them` });
    map.cells.forEach((kind, place) => svg.append(drawing("rect", {
      x: (place % map.cols) * SIZE, y: Math.floor(place / map.cols) * SIZE, width: SIZE, height: SIZE, class: `cell${KINDS.includes(kind) ? ` ${kind}` : ""}`,
    })));
    const most = Math.max(...arrows.map(({ count }) => count));
    svg.append(...arrows.map((arrow) => draw(arrow, map, most)));
    return element("div", { class: "map-side" }, element("h3", {}, heading), svg, list(map, arrows, heading));
  }

  function list(map, arrows, heading) {
    const row = (arrow) => element("tr", {}, element("th", { scope: "row" }, cellName(arrow, map)),
      element("td", { class: "text" }, looks(arrow) ? `${arrow.action}, facing ${DIRECTIONS[arrow.direction]}` : arrow.action), element("td", {}, number(arrow.count)),
      element("td", {}, signed(arrow.score)), element("td", {}, percent(arrow.praised)));
    const heads = ["cell", "action", "records", "mean score", "praised"].map((text, at) => element("th", { scope: "col", class: at === 1 ? "text" : null }, text));
    return element("details", {}, element("summary", {}, "As a table"), element("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": `Table: ${heading}` },
      element("table", { class: "changes" }, element("caption", {}, heading), element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...arrows.map(row)))));
  }

  function legend(map) {
    const key = (kind, text) => element("span", { class: "key" }, element("i", { class: kind, "aria-hidden": "true" }), text);
    return element("p", { class: "map-legend" }, key("high", "the advantage praised the action"), key("low", "the advantage blamed it"),
      map.arrows.some(({ turn }) => turn === null) ? key("dot", "neither a turn nor a step") : null,
      ...KINDS.filter((kind) => map.cells.includes(kind)).map((kind) => key(`cell ${kind}`, kind)));
  }

  const show = (map) => [legend(map), element("div", { class: "maps" }, ...SIDES.map(([name, words]) => side(map, name, words)))];

  return { show };
})();
