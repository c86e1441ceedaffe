// What all parts of the page share. Names come from files of strangers: they are written as text, never as markup.
const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
const data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");

// A sign for each character that would recolour, break or turn a line around.
const visible = (text) => String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "\ufffd");

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== "") made.append(child instanceof Node ? child : visible(child));
  }
  return made;
}

const figure = (value) => {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
};
const cut = (text, most) => (text.length <= most ? text : text.slice(0, most - 1) + "…");

// One colour for each fusion, in the order in which they first appear.
const sites = data.sites || [];
const fusions = [...new Set([...sites.map((site) => site.fusion), ...(data.tensors || []).map((t) => t.fusion).filter(Boolean)])];
const COLOURS = 12;
const colourOf = (fusion) => (fusions.includes(fusion) ? `var(--f${fusions.indexOf(fusion) % COLOURS})` : "var(--bar)");
const resolved = (name) => getComputedStyle(document.documentElement).getPropertyValue(name.replace(/^var\(|\)$/g, "")).trim();

const swatch = (colour, text, kind = "") => el("span", { class: "swatch" }, el("i", { style: `--c: ${colour}`, class: kind, "aria-hidden": "true" }), text);

// Draws when the part comes near, and again when its width changes; on paper all of them.
const drawn = [];
const nearing = new IntersectionObserver((entries) => entries.forEach((entry) => entry.isIntersecting && entry.target.begin?.()), { rootMargin: "500px" });
function whenNear(holder, begin) {
  let begun = false;
  holder.begin = () => { if (!begun) { begun = true; nearing.unobserve(holder); begin(); } };
  nearing.observe(holder);
  drawn.push(holder);
}
function chart(id, draw) {
  const holder = $(id);
  if (!holder) return () => {};
  let width = 0;
  const render = () => {
    width = holder.clientWidth || 900;
    const picture = draw(width);
    picture.setAttribute("aria-hidden", "true"); // the holder says what it is, and a table beside it holds the figures
    holder.replaceChildren(picture);
  };
  whenNear(holder, () => {
    render();
    new ResizeObserver(() => { if (holder.clientWidth && Math.abs(holder.clientWidth - width) > 8) render(); }).observe(holder);
  });
  return () => { if (width) render(); };
}

function pressed(buttons, chosen) {
  for (const button of buttons) button.setAttribute("aria-pressed", String(button === chosen));
}
