// Draws the page's figures, and again in other colours when the reader's preference changes.
(() => {
  "use strict";

  const figures = JSON.parse(document.getElementById("figures-data").textContent);
  const style = getComputedStyle(document.documentElement);
  const touched = matchMedia("(pointer: coarse)").matches;
  const config = {
    displaylogo: false,
    responsive: true,
    displayModeBar: touched ? false : "hover",
    // A tap counts as two clicks.
    doubleClick: touched ? false : "reset",
    // Named one by one: left to itself Plotly adds a button that uploads the figure to its maker's servers.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    showSendToCloud: false,
    plotlyServerURL: "",
  };

  const colour = (name) => style.getPropertyValue(name).trim();

  function themed(layout) {
    const axis = {
      gridcolor: colour("--line"),
      zerolinecolor: colour("--soft"),
      linecolor: colour("--line"),
      color: colour("--soft"),
    };
    return {
      ...layout,
      // Not transparent: a figure that is saved as a picture keeps the ground on which it can be read.
      paper_bgcolor: colour("--paper"),
      plot_bgcolor: colour("--paper"),
      font: { family: "system-ui, sans-serif", size: 12.5, color: colour("--soft") },
      hoverlabel: { bgcolor: colour("--paper"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--ink") },
      xaxis: { ...layout.xaxis, ...axis, unifiedhovertitle: { text: "round %{x}" } },
      yaxis: { ...layout.yaxis, ...axis },
      // Where fingers scroll the page they must not move a figure's axes.
      dragmode: touched ? false : "zoom",
      // What the reader zoomed into or switched off stays so.
      uirevision: "kept",
    };
  }

  // Only figures near the window are drawn, one after another with a pause for the reader; the last call prevails.
  const holders = [...document.querySelectorAll("#figures .figure")];
  const near = new Set(), late = new Set(figures.keys());
  let drawing = false;
  async function draw() {
    if (drawing || ![...near].some((number) => late.has(number))) return;
    drawing = true;
    try {
      await Packed.load("plotly-source");
    } catch (error) {
      for (const holder of holders) holder.textContent = error.message;
      return void (drawing = false);
    }
    for (let number; (number = [...near].find((one) => late.has(one))) !== undefined; ) {
      late.delete(number);
      const { data, layout } = figures[number];
      await new Promise((resume) => setTimeout(resume));
      await Plotly.react(holders[number], data, themed(layout), config);
    }
    drawing = false;
  }

  function drawAll() {
    figures.forEach((_, number) => late.add(number));
    draw();
  }

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        const number = holders.indexOf(target);
        if (isIntersecting) near.add(number);
        else near.delete(number);
      }
      draw();
    },
    { rootMargin: "400px 0px" },
  );
  const watch = () => holders.forEach((holder) => watcher.observe(holder));
  // Before the explorer shows its round the page is short, so that every figure would be near.
  if (document.getElementById("explorer")) document.addEventListener("explorer-shown", watch, { once: true });
  else watch();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  function addHolder(title, about) {
    const [section, heading, text, holder] = ["section", "h2", "p", "div"].map((tag) => document.createElement(tag));
    [heading.textContent, text.textContent] = [title, about];
    Object.assign(holder, { id: `figure-${holders.length}`, className: "figure", role: "img", ariaLabel: title });
    section.append(heading, text, holder);
    document.getElementById("figures").append(section);
    document.getElementById("figures-link").hidden = false;
    watcher.observe(holder);
    return holders.push(holder) - 1;
  }

  // Called with the figures of a served run, and again when it has other rounds.
  window.updateFigures = (news) => {
    for (const { title, about, figure } of news) {
      const number = holders.findIndex((holder) => holder.getAttribute("aria-label") === title);
      figures[number >= 0 ? number : addHolder(title, about)] = figure;
    }
    drawAll();
  };
})();
