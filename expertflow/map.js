// The picture of residency: one byte for each expert (nbs/13_map.ipynb says what its bits mean). Bytes arrive as fast as they like;
// what is painted is the latest, on the browser's next frame, and of it only the squares that have changed.

const STYLE = `
.ef-map { font: 12px var(--jp-ui-font-family, system-ui, sans-serif); color: var(--jp-ui-font-color1, inherit); min-width: 260px; contain: layout style; display: flex; flex-wrap: wrap; gap: 4px 10px; }
.ef-map .ef-picture { flex: 5 1 260px; min-width: 0; overflow-x: auto; }
.ef-map .ef-said { flex: 4 1 240px; min-width: 0; display: flex; flex-direction: column; gap: 6px; }
.ef-map .ef-box { flex: 1 1 150px; contain: strict; overflow-y: auto; display: flex; flex-direction: column-reverse; padding: 4px 6px; line-height: 1.35; font-size: 13px; border: 1px solid var(--jp-border-color1, #999); }
.ef-map .ef-text { white-space: pre-wrap; margin-bottom: auto; }
.ef-map .ef-bar, .ef-map .ef-legend { display: flex; flex-wrap: wrap; align-items: center; gap: 2px 10px; margin: 2px 0; }
.ef-map .ef-title { flex: 1 1 auto; }
.ef-map button { font: inherit; padding: 1px 8px; cursor: pointer; color: inherit; border: 1px solid currentColor; border-radius: 3px; background: transparent; }
.ef-map input[type=range] { flex: 2 1 120px; min-width: 80px; }
.ef-map canvas.ef-cells { display: block; cursor: crosshair; }
.ef-map canvas.ef-cells:focus-visible, .ef-map button:focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2); outline-offset: -2px; }
.ef-map .ef-legend span { white-space: nowrap; }
.ef-map .ef-legend img { width: 12px; height: 12px; vertical-align: -2px; margin-right: 3px; }
.ef-map .ef-detail { min-height: 1.4em; margin: 2px 0; }`;

const PINNED = 32, COLD = 64, EXPECTED = 128;       // marks that come on top of a state
const LABELS = 26;                                  // CSS pixels: room for the numbers of layers

function isDark(el) {
  for (let e = el; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor.match(/[\d.]+/g)?.map(Number);
    if (c && (c.length < 4 || c[3] > 0.5)) return 0.299 * c[0] + 0.587 * c[1] + 0.114 * c[2] < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// One square in w x h pixels at x, y: the same as `square` in the notebook.
function square(g, look, cell, x, y, w, h, theme, ink) {
  const kind = look.of[cell];
  g.clearRect(x, y, w, h);
  if (kind < 0) return;
  const { mark, [theme]: colour } = look.states[kind], absent = look.states[0][theme];
  const small = Math.min(w, h) < 5, W = w - !small, H = h - !small;
  g.fillStyle = !small && (mark === "ring" || mark === "cross") ? absent : colour;
  g.fillRect(x, y, W, H);
  if (small) return;
  const t = Math.max(1, Math.round(Math.min(W, H) / 6));
  g.fillStyle = g.strokeStyle = colour;
  g.lineWidth = t;
  if (mark === "ring") g.strokeRect(x + t / 2, y + t / 2, W - t, H - t);
  if (mark === "cross") { g.beginPath(); g.moveTo(x, y); g.lineTo(x + W, y + H); g.moveTo(x + W, y); g.lineTo(x, y + H); g.stroke(); }
  g.fillStyle = absent;
  if (mark === "dot") g.fillRect(x + W / 3, y + H / 3, W / 3, H / 3);
  if (mark === "bar") g.fillRect(x + 1, y + H / 2 - t / 2, W - 2, t);
  if (mark === "post") g.fillRect(x + W / 2 - t / 2, y + 1, t, H - 2);
  g.fillStyle = g.strokeStyle = ink;
  const corner = (cx, cy, dx, dy) => { g.beginPath(); g.moveTo(cx, cy); g.lineTo(cx + dx, cy); g.lineTo(cx, cy + dy); g.fill(); };
  if (cell & COLD) corner(x, y + H, W / 2, -H / 2);
  if (cell & EXPECTED) corner(x + W, y, -W / 3, H / 3);
  if (cell & PINNED) { g.lineWidth = 1; g.strokeRect(x + 0.5, y + 0.5, W - 1, H - 1); }
}

function element(tag, cls, parent, text = "") {
  const e = document.createElement(tag);
  e.className = cls;
  e.textContent = text;
  parent.append(e);
  return e;
}

function render({ model, el }) {
  const look = model.get("look"), layers = model.get("layers"), L = layers.length, E = Math.max(...layers);
  const root = element("div", "ef-map", el);
  element("style", "", root, STYLE);
  const side = element("div", "ef-picture", root);
  const bar = element("div", "ef-bar", side), title = element("span", "ef-title", bar);
  const canvas = element("canvas", "ef-cells", side), g = canvas.getContext("2d");
  const legend = element("div", "ef-legend", side), detail = element("div", "ef-detail", side);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  detail.setAttribute("aria-live", "polite");

  // What is to be seen: a picture that the kernel sends, or one of a film that is here as a whole.
  const film = model.get("film"), frames = film.byteLength / (L * E);
  let at = model.get("at");
  const bytes = (view) => new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  let nth = Infinity, next = 0;                     // of the pictures that came together, and the timer for the one after it
  const sent = () => model.get("cells").byteLength / (L * E);
  const one = (all, i) => bytes(all).subarray(i * L * E, (i + 1) * L * E);
  const now = () => frames ? one(film, at) : one(model.get("cells"), Math.min(nth, sent() - 1));

  // Painting
  let theme, ink, dpr, w, h, left, wide = 0, sprites, shown = null, frame = 0, cursor = model.get("hovered");
  canvas.painted = 0;                               // pictures so far, for measurements
  function layout() {
    theme = isDark(el) ? "dark" : "light";
    ink = getComputedStyle(root).color;
    dpr = devicePixelRatio || 1;
    left = Math.round(LABELS * dpr);
    w = Math.max(1, Math.min(Math.round(24 * dpr), Math.floor((wide * dpr - left) / E)));
    h = Math.max(2, Math.min(w, Math.round(18 * dpr), Math.floor(model.get("height") * dpr / L)));
    canvas.width = left + w * E;
    canvas.height = h * L;
    canvas.style.width = canvas.width / dpr + "px";
    canvas.style.height = canvas.height / dpr + "px";
    const sheet = new OffscreenCanvas(16 * w, 16 * h), s = sheet.getContext("2d");
    for (let c = 0; c < 256; c++) square(s, look, c, (c % 16) * w, (c >> 4) * h, w, h, theme, ink);
    sprites?.close();
    sprites = sheet.transferToImageBitmap();        // drawn from a canvas, each square would be a snapshot of all of it
    g.font = `${9 * dpr}px sans-serif`;
    g.fillStyle = ink;
    g.textBaseline = "middle";
    g.textAlign = "right";
    for (let l = 0, free = -1; l < L; l++) {
      if (l * h < free) continue;
      g.fillText(l, left - 4 * dpr, (l + 0.5) * h);
      free = l * h + 12 * dpr;
    }
    drawLegend();
    shown = null;
  }
  function paint() {
    frame = 0;
    if (!wide) return;                              // not in the page yet, or hidden: the observer calls again
    if (!w || dpr !== (devicePixelRatio || 1)) layout();
    const cells = now(), count = new Array(look.states.length).fill(0);
    if (cells.length !== L * E) return;
    let resident = 0;
    for (let i = 0; i < cells.length; i++) {
      const c = cells[i];
      if (look.of[c] >= 0) count[look.of[c]]++;
      resident += (c & 3) === 2;
      if (shown && shown[i] === c && i !== cursor) continue;
      const x = left + (i % E) * w, y = Math.floor(i / E) * h;
      g.clearRect(x, y, w, h);
      g.drawImage(sprites, (c % 16) * w, (c >> 4) * h, w, h, x, y, w, h);
    }
    shown = cells.slice();
    canvas.cells = shown;
    if (cursor >= 0) { g.strokeStyle = ink; g.lineWidth = dpr; g.strokeRect(left + (cursor % E) * w + dpr / 2, Math.floor(cursor / E) * h + dpr / 2, w - dpr, h - dpr); }
    canvas.painted++;
    if (!frames && nth + 1 < sent()) return;        // words are for the last of the pictures that came together
    numbers.forEach((e, i) => { if (e.textContent !== String(count[i])) e.textContent = count[i]; });
    canvas.dataset.resident = resident;
    tell();
  }
  const soon = () => { frame ||= requestAnimationFrame(paint); };

  // Legend: each state with how many there are of it, and the marks that come on top
  let numbers = [];
  function drawLegend() {
    legend.replaceChildren();
    const n = Math.round(12 * dpr), sheet = document.createElement("canvas"), s = sheet.getContext("2d");
    sheet.width = sheet.height = n;
    const swatch = (cell, text) => {
      const span = element("span", "", legend), img = element("img", "", span);
      square(s, look, cell, 0, 0, n, n, theme, ink);
      img.alt = "";
      img.src = sheet.toDataURL();                  // a canvas would be composed anew for each picture of the map
      span.append(text + " ");
      return element("b", "", span);
    };
    numbers = look.states.map((s, i) => swatch(look.of.indexOf(i), s.name));
    for (const [bit, name] of [[PINNED, "in use"], [COLD, "cold"], [EXPECTED, "expected"]]) swatch(2 | bit, name);
  }

  // Words
  function tell() {
    const t = model.get("title"), text = frames ? `${t}, pass ${model.get("passes")[at] + 1}` : t;
    if (title.textContent !== text) title.textContent = text;
    const c = shown?.[cursor], known = model.get("detail");
    let words = "";
    if (cursor >= 0 && c !== undefined && look.of[c] >= 0) {
      words = `layer ${Math.floor(cursor / E)}, expert ${cursor % E}: ${look.states[look.of[c]].name}`;
      if (known.id === cursor) words += known.text;
    }
    if (detail.textContent !== words) detail.textContent = words;
    canvas.setAttribute("aria-label", `${L} layers of up to ${E} experts, ${canvas.dataset.resident ?? 0} resident. Arrow keys look at one. ${words}`);
  }
  let late = 0;
  const later = () => { late ||= setTimeout(() => { late = 0; model.set("hovered", cursor); model.set("at", at); model.save_changes(); }, 120); };
  function point(i) {
    if (i === cursor) return;
    if (shown && cursor >= 0) shown[cursor] = shown[cursor] ^ 255;     // the old square is drawn again, without its frame
    cursor = i;
    soon();
    later();
  }
  canvas.addEventListener("pointermove", (e) => {
    const x = Math.floor((e.offsetX * dpr - left) / w), y = Math.floor(e.offsetY * dpr / h);
    point(x >= 0 && x < layers[y] ? y * E + x : -1);
  });
  canvas.addEventListener("pointerleave", () => point(-1));
  canvas.addEventListener("keydown", (e) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -E, ArrowDown: E }[e.key];
    if (e.key === "Escape") point(-1);
    else if (e.key === " ") (frames ? play : pause).click();
    else if (step === undefined) return;
    else { const i = cursor < 0 ? 0 : cursor + step; if (i >= 0 && i < L * E && i % E < layers[Math.floor(i / E)]) point(i); }
    e.preventDefault();
    e.stopPropagation();                            // the notebook has other plans with these keys
  });

  // Pause, or play
  let pause, play, slider, timer = 0;
  if (frames) {
    play = element("button", "ef-play", bar, "Play");
    slider = element("input", "ef-scrub", bar);
    Object.assign(slider, { type: "range", min: 0, max: frames - 1, value: at });
    slider.setAttribute("aria-label", "pass");
    const show = (i) => { at = i; slider.value = i; soon(); later(); };
    const halt = () => { clearInterval(timer); timer = 0; play.textContent = "Play"; };
    play.onclick = () => {
      if (timer) return halt();
      if (at === frames - 1) show(0);
      play.textContent = "Stop";
      timer = setInterval(() => at < frames - 1 ? show(at + 1) : halt(), 1000 / model.get("speed"));
    };
    slider.oninput = () => { halt(); show(Number(slider.value)); };
    model.on("change:at", onAt);
  } else {
    pause = element("button", "ef-pause", bar);
    pause.onclick = () => { model.set("paused", !model.get("paused")); model.save_changes(); };
    model.on("change:paused", onPaused);
    onPaused();
  }
  function onAt() { if (!timer && !late && model.get("at") !== at) { at = model.get("at"); slider.value = at; soon(); } }
  function onPaused() { pause.textContent = model.get("paused") ? "Resume" : "Pause"; pause.setAttribute("aria-pressed", model.get("paused")); soon(); }
  function onCells() { if (!model.get("paused")) reveal(0); }
  function reveal(i) {
    clearTimeout(next);
    nth = i;
    soon();
    if (i + 1 < sent()) next = setTimeout(() => reveal(i + 1), model.get("period"));
  }
  function again() { w = 0; soon(); }
  function sized() { if (side.clientWidth !== wide) { wide = side.clientWidth; again(); } }

  // What is said beside the picture; it comes in the same message, so that the browser has one frame to draw and not two
  let aside, box;
  const parts = [];                                 // the text, then the HTML beside it
  function say(i, parent, how, words) {
    const part = parts[i] ??= { e: element("div", i ? "" : "ef-text", parent) };
    if (part.was !== words) part.e[how] = part.was = words;
  }
  function onWords() {
    const text = model.get("text"), beside = model.get("beside");
    if (text === null && !beside.length) return;
    aside ??= element("div", "ef-said", root);
    if (text !== null) say(0, box ??= element("div", "ef-box", aside), "textContent", text);
    beside.forEach((html, i) => say(i + 1, aside, "innerHTML", html));
  }

  model.on("change:cells", onCells);
  model.on("change:title", soon);
  model.on("change:detail", soon);
  model.on("change:text", onWords);
  model.on("change:beside", onWords);
  onWords();
  const size = new ResizeObserver(sized), dress = new MutationObserver(again);
  size.observe(side);
  dress.observe(document.body, { attributes: true, attributeFilter: ["class", "data-jp-theme-light", "data-jp-theme-name"] });
  soon();
  return () => {
    clearInterval(timer);
    clearTimeout(late);
    clearTimeout(next);
    sprites?.close();
    cancelAnimationFrame(frame);
    size.disconnect();
    dress.disconnect();
    for (const [name, f] of [["cells", onCells], ["title", soon], ["detail", soon], ["text", onWords], ["beside", onWords], ["at", onAt], ["paused", onPaused]]) model.off("change:" + name, f);
  };
}

export default { render };
