// Unpacks what this page holds compressed, gzip in base64, and loads libraries: held by a file, or a server's.
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
    if (!source.dataset.address) {
      script.textContent = await unpack(source.textContent).text();
      return source.replaceWith(script);
    }
    await new Promise((resolve, reject) => {
      script.onload = resolve;
      script.onerror = () => reject(Object.assign(new Error("The server does not answer."), { gone: true }));
      script.src = source.dataset.address;
      source.after(script);
    }).catch((error) => {
      scripts.delete(id); // it is asked for again
      throw error;
    });
  }

  // Libraries are large: one is loaded when it is first needed.
  function load(id) {
    if (!scripts.has(id)) scripts.set(id, run(id));
    return scripts.get(id);
  }

  return { unpack, load };
})();
