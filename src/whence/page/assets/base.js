// What the parts of the explorer share: elements, numbers as text, colours, plain sentences.
// All text goes in by textContent, so that none of it is taken for markup.
const Whence = (() => {
  "use strict";

  function element(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style") node.style.cssText = value;
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  const SVG = "http://www.w3.org/2000/svg";
  function drawing(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // A curve over rounds in a drawing 1000 wide, with a cursor at one of them; and its range, in words.
  function drawSpark(values, place, height) {
    const known = values.filter(isNumber);
    if (!known.length) return { nodes: [], range: "" };
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const x = (at) => (values.length > 1 ? (at / (values.length - 1)) * 1000 : 500);
    const y = (value) => height - 4 - ((value - low) / (high - low || 1)) * (height - 10);
    const points = values.flatMap((value, at) => (isNumber(value) ? [[x(at), y(value)]] : []));
    const ground = [[points.at(-1)[0], height], [points[0][0], height]];
    const nodes = [drawing("polygon", { points: [...points, ...ground].join(" "), class: "area" }), drawing("polyline", { points: points.join(" "), class: "line" })];
    if (place >= 0) nodes.push(drawing("line", { x1: x(place), x2: x(place), y1: 0, y2: height, class: "cursor" }));
    return { nodes, range: low === high ? `always ${number(low)}` : `${number(low)} to ${number(high)}` };
  }

  // Whether the records are a language model's responses, and what the page calls one.
  const language = document.documentElement.dataset.kind === "responses";
  const one = language ? "response" : "record";
  const One = language ? "Response" : "Record";

  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  // Three digits are enough to read; integers stay whole.
  function number(value, digits = 3) {
    if (!isNumber(value)) return "–";
    const size = Math.abs(value);
    let text;
    if (Number.isInteger(value) && size < 1e6) text = size.toLocaleString("en");
    else if (size >= 1e6 || size < 1e-4) text = size.toExponential(1);
    else text = String(Number(size.toPrecision(digits)));
    return (value < 0 ? "−" : "") + text;
  }

  const signed = (value, digits) => (isNumber(value) && value > 0 ? "+" : "") + number(value, digits);

  // A value is written no finer than its error's two digits: −22 ± 14, not −22.3 ± 14.
  function withError(value, error) {
    if (!isNumber(value) || !isNumber(error) || error <= 0) return signed(value) + (isNumber(error) ? ` ± ${number(error)}` : "");
    const place = Math.floor(Math.log10(Number(error.toPrecision(2)))) - 1;
    const digits = value ? Math.floor(Math.log10(Math.abs(value))) - place + 1 : 0;
    return `${signed(digits > 0 ? Number(value.toPrecision(Math.min(3, digits))) : 0)} ± ${number(error, 2)}`;
  }

  const percent = (share) => (!isNumber(share) ? "–" : share > 0 && share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`);
  const id = (value) => (isNumber(value) ? value.toLocaleString("en") : String(value));

  // "step 214 of episode 37 in environment 3", as far as it is known; `several` is whether the round has more than one.
  function place(moment) {
    const parts = [];
    if (isNumber(moment.step)) parts.push(`step ${number(moment.step)}`);
    if (isNumber(moment.episode)) parts.push(`${parts.length ? "of " : ""}episode ${id(moment.episode)}`);
    if (isNumber(moment.env) && Whence.several) parts.push(`in environment ${id(moment.env)}`);
    return parts.join(" ");
  }

  // An action's label; a bare number says nothing by itself.
  function nameAction(action, labels) {
    const text = String(action ?? "–");
    const label = /^\d+$/.test(text) ? labels?.[Number(text)] : null;
    return label ?? (/^-?[\d.]+(e[-+]?\d+)?(,|$)/.test(text) ? `action ${text}` : text);
  }

  // What training on a record does, from the signs of its score and its advantage.
  function explainScore(score, significant, target = "return") {
    if (!isNumber(score)) return `This ${one} was not scored.`;
    if (significant === false) return `Its ${language ? "score" : "influence"} cannot be told from 0: it is within two errors.`;
    const raised = target === "return" ? "estimated return" : target;
    return score < 0
      ? `Harmful: training on it lowers the ${raised}.`
      : `Helpful: training on it raises the ${raised}.`;
  }

  function explainAdvantage(advantage) {
    if (!isNumber(advantage) || advantage === 0) return "";
    return advantage > 0 ? ", so training makes the action more likely" : ", so training makes the action less likely";
  }

  // Whether fresh rollouts confirm the advantage: [kind, heading, sentence].
  function judgeAdvantage(advantage, truth, error) {
    if (!isNumber(truth) || !isNumber(advantage)) return ["unknown", "Not measured here.", ""];
    const measured = `Fresh rollouts from this state measured ${withError(truth, error)}.`;
    const margin = 2 * (isNumber(error) ? error : 0);
    const apart = Math.abs(advantage - truth) > margin;
    if (Math.abs(truth) <= margin) {
      const heading = apart ? `The advantage was too ${advantage > truth ? "high" : "low"}.` : "It cannot be told whether the advantage was right.";
      return ["fair", heading, `${measured} That may be 0: the action may be better or worse than average.`];
    }
    if (Math.sign(truth) !== Math.sign(advantage)) {
      const fault = advantage > 0 ? "It praised an action that was worse than average." : "It blamed an action that was better than average.";
      return ["poor", "The advantage had the wrong sign.", `${measured} ${fault}`];
    }
    if (!apart) return ["good", "The advantage was right.", `${measured} The two agree within two errors.`];
    const size = Math.abs(advantage) > Math.abs(truth) ? "too large" : "too small";
    return ["fair", `The advantage had the right sign, but was ${size}.`, measured];
  }

  // A sentence's parts: what stands between backticks is code.
  const withCode = (text) => text.split("`").map((part, place) => (place % 2 ? element("code", {}, part) : part));

  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();

  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

  // Colours from the lowest score over none to the highest, `LEVELS` on either side.
  const LEVELS = 24;
  function palette() {
    const [low, middle, high] = ["--cell-low", "--cell-none", "--cell-high"].map((name) => channels(colour(name)));
    return Array.from({ length: 2 * LEVELS + 1 }, (_, place) => {
      const share = Math.abs(place - LEVELS) / LEVELS;
      const end = place < LEVELS ? low : high;
      return `rgb(${middle.map((part, k) => Math.round(part + (end[k] - part) * share)).join(",")})`;
    });
  }

  // The size at which a colour is full: one outlier must not pale all others.
  function colourScale(scores) {
    const sizes = scores.filter(isNumber).map(Math.abs).sort((one, other) => one - other);
    return sizes.length ? sizes[Math.floor(0.985 * (sizes.length - 1))] || sizes.at(-1) || 1 : 1;
  }

  function level(score, scale) {
    const share = Math.min(1, Math.abs(score) / scale) ** 0.7;
    return LEVELS + Math.sign(score) * Math.round(share * LEVELS);
  }

  const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  return {
    element, drawing, drawSpark, language, one, One, isNumber, number, signed, withError, percent, id, place, nameAction, explainScore, explainAdvantage,
    judgeAdvantage, withCode, colour, palette, colourScale, level, calm, dark, several: false,
  };
})();
