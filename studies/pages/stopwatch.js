// Seconds until a page shows what was asked for. Defined before the page's own scripts run; `PATIENCE` comes first.
const look = (selector) => document.querySelector(selector);
const isVisible = (selector) => Boolean(look(selector)?.checkVisibility());
const firstRow = () => look("#grid .tabulator-row button.link")?.getAttribute("aria-label") ?? null;
const firstCard = () => look(".column:not([hidden]) .card")?.dataset.record ?? null;
const shownRound = () => look("#explorer-round-name b")?.textContent.split(" of ")[0] ?? null;
const isUsable = () => Boolean(shownRound()) && isVisible(".card") && isVisible("#grid .tabulator-row");

// The time at which a frame has been painted in which something holds.
const whenPainted = (holds) => new Promise((resolve, reject) => {
  const late = performance.now() + PATIENCE;
  const check = () => {
    if (holds()) requestAnimationFrame(() => resolve(performance.now()));
    else if (performance.now() > late) reject(new Error(`Not seen: ${holds}`));
    else requestAnimationFrame(check);
  };
  check();
});

// Seconds from an action until what it asks for is painted.
async function time(act, holds) {
  const start = performance.now();
  act();
  return (await whenPainted(holds) - start) / 1000;
}

// Counted from the start of the navigation.
const usable = whenPainted(isUsable);

const stopwatch = window.stopwatch = {
  usable: async () => (await usable) / 1000,

  round(number, act) {
    const [card, row, name] = [firstCard(), firstRow(), `Round ${number.toLocaleString("en")}`];
    const isNew = (one, before) => one !== null && one !== before;
    return time(act, () => shownRound() === name && isNew(firstCard(), card) && isNew(firstRow(), row));
  },

  slide(number, place) {
    const slider = look("#explorer-round");
    return stopwatch.round(number, () => { slider.value = place; slider.dispatchEvent(new Event("input")); });
  },

  async moment(act, record) {
    const title = `Record ${Number(record).toLocaleString("en")}`;
    const image = () => look("#moment figure img");
    const isLoading = () => look("#moment .moment-place").textContent === "Loading …";
    const isDrawn = () => !image() || (image().complete && image().naturalWidth > 0);
    const isShown = () =>
      look("#moment-title")?.textContent === title && isVisible("#moment .story") && !isLoading() && isDrawn();
    return { seconds: await time(act, isShown), framed: Boolean(image()) };
  },

  card() {
    const card = look(".column:not([hidden]) .card");
    return stopwatch.moment(() => card.click(), card.dataset.record);
  },

  record(number, record) {
    return stopwatch.moment(() => { location.hash = `#run=0&round=${number}&record=${record}`; }, record);
  },

  async advantage() {
    const headings = () => [...document.querySelectorAll("#moment .say b")].map((heading) => heading.textContent);
    const isPending = () => headings().includes("Being measured …");
    const seconds = await time(() => {}, () => !isPending());
    return { seconds, measured: Boolean(look("#moment .measures")) };
  },

  sort(column) {
    const row = look("#grid .tabulator-row");
    const heading = look(`#grid .tabulator-col[tabulator-field="${column}"]`);
    const isNew = () => ![null, row].includes(look("#grid .tabulator-row"));
    return time(
      () => heading.querySelector(".tabulator-col-title").click(),
      () => isNew() && heading.ariaSort === "ascending",
    );
  },

  filter(column, text) {
    const note = look("#grid-note").textContent;
    const input = look(`#grid .tabulator-col[tabulator-field="${column}"] input`);
    return time(
      () => { input.value = text; input.dispatchEvent(new Event("input")); },
      () => look("#grid-note").textContent !== note && firstRow() !== null,
    );
  },
};
