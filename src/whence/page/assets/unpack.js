// Unpacks what this page holds compressed: gzip in base64.
const Packed = (() => {
  "use strict";

  const scripts = new Map();

  function unpack(text) {
    if (typeof DecompressionStream === "undefined") {
      throw new Error("This browser cannot unpack what the page holds. Open it in Chrome or Edge 80, Firefox 113, Safari 16.4, or a later one.");
    }
    const bytes = Uint8Array.from(atob(text.trim().replace(/^"|"$/g, "")), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
  }

  async function run(id) {
    const source = document.getElementById(id);
    const script = document.createElement("script");
    script.textContent = await unpack(source.textContent).text();
    source.replaceWith(script);
  }

  // Libraries are large: the text of one becomes a script when it is first needed.
  function load(id) {
    if (!scripts.has(id)) scripts.set(id, run(id));
    return scripts.get(id);
  }

  return { unpack, load };
})();
