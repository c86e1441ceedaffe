// The layers of both engines along time, automatic over fused. Wheel and drag zoom and move; keys walk from layer to layer.
if (data.layers && $("chart-layers")) {
  const holder = $("chart-layers");
  const SIDES = ["automatic", "fused"];
  const ofNode = new Map(sites.filter((site) => site.node).map((site) => [site.node, site]));
  const diff = data.layers.diff ?? {};
  const cutNames = new Set((diff.cut ?? []).map((c) => (typeof c === "object" ? c.name : c)));
  const addedNames = new Set([...(diff.added ?? []), ...(diff.removed ?? [])].map((l) => (typeof l === "object" ? l.name : l)));
  const changedNodes = new Set((diff.changed ?? []).flatMap((c) => c.nodes ?? []));
  const lanes = Object.fromEntries(SIDES.map((side) => {
    let at = 0;
    return [side, data.layers[side].map((layer, i) => ({ ...layer, side, i, x1: at, x2: (at += layer.us), ...kindOf(layer, side) }))];
  }));
  const total = Math.max(...SIDES.map((side) => d3.sum(lanes[side], (l) => l.us)), 1e-6);
  let domain = [0, total];
  let chosen = null;
  let plot = null;

  function kindOf(layer, side) {
    const plugin = /plugin/i.test(layer.type);
    const site = plugin ? layer.nodes.map((n) => ofNode.get(n) ?? ofNode.get(n.split("/")[0])).find(Boolean) : null;
    if (site) return { kind: site.fusion, colour: colourOf(site.fusion) };
    if (plugin) return { kind: "plugin", colour: "var(--accent)" };
    if (addedNames.has(layer.name) || /^(reformat|cast|shuffle|copy|memcpy)/i.test(layer.type) || /^Reformat/.test(layer.name)) return { kind: "reformat or copy", colour: "var(--warn-bar)" };
    if (side === "automatic" && (cutNames.has(layer.name) || cutNames.has(/_myl(\d+)_\d+$/.exec(layer.name)?.[0].replace(/^_|_\d+$/g, "")))) return { kind: "cut apart", colour: "var(--cut)" };
    if (layer.nodes.some((node) => changedNodes.has(node))) return { kind: "changed", colour: "var(--changed)" };
    return { kind: "as before", colour: "var(--bar)" };
  }

  function draw(width) {
    const every = SIDES.flatMap((side) => lanes[side]).filter((l) => l.us > 0 && l.x2 > domain[0] && l.x1 < domain[1]);
    const scale = (width - 96) / (domain[1] - domain[0]);
    const shown = every.map((l) => ({ ...l, a: Math.max(l.x1, domain[0]), b: Math.min(l.x2, domain[1]) }));
    plot = Plot.plot({
      ...base, width, height: 176, marginLeft: 78, marginRight: 18, marginTop: 8, marginBottom: 36,
      x: { domain, label: "microseconds, one layer after the other →", ticks: Math.max(4, width / 120) },
      y: { domain: SIDES, label: null, tickSize: 0, padding: 0.16 },
      marks: [
        Plot.barX(shown, { x1: "a", x2: "b", y: "side", fill: "colour", stroke: "var(--paper)", strokeWidth: (l) => (l.us * scale > 3 ? 1 : 0) }),
        Plot.text(shown.filter((l) => (l.b - l.a) * scale > 46), { x: (l) => (l.a + l.b) / 2, y: "side", text: (l) => cut(visible(short(l)), Math.floor(((l.b - l.a) * scale - 8) / 6.6)), fill: "var(--ink)", fontSize: 11 }),
        chosen ? Plot.barX(shown.filter((l) => l.side === chosen.side && l.i === chosen.i), { x1: "a", x2: "b", y: "side", fill: "none", stroke: "var(--accent)", strokeWidth: 3 }) : null,
      ],
    });
    return plot;
  }
  const short = (layer) => (layer.kind === "as before" || layer.kind === "changed" || layer.kind === "cut apart" ? layer.nodes[0]?.split("/").pop() ?? layer.name : layer.kind);
  const redraw = chart("chart-layers", draw);
  const kinds = new Map(SIDES.flatMap((side) => lanes[side]).map((l) => [l.kind, l.colour]));
  $("legend-layers").append(...[...kinds].map(([kind, colour]) => swatch(colour, kind)));

  function at(event) {
    const box = holder.getBoundingClientRect();
    const [x, y] = [plot.scale("x").invert(event.clientX - box.left), event.clientY - box.top];
    const side = SIDES[y < (176 - 36 + 8) / 2 ? 0 : 1];
    return lanes[side].find((l) => x >= l.x1 && x < l.x2) ?? null;
  }
  function tell(layer) {
    const head = el("p", {}, el("b", {}, layer.name), ` `, el("span", { class: "chip" }, layer.kind));
    const facts = el("dl", { class: "pairs" }, pair("engine", layer.side), pair("time", `${layer.us.toFixed(2)} µs, ${((100 * layer.us) / d3.sum(lanes[layer.side], (l) => l.us)).toFixed(1)} % of all layers`), pair("type", layer.type), pair("kernel", layer.kernel || "–"));
    const nodes = layer.nodes.length ? el("div", { class: "links" }, "ONNX nodes: ", layer.nodes.slice(0, 60).map((node) => el("button", { type: "button", class: "link", onclick: () => goTo(node, layer.side) }, node)), layer.nodes.length > 60 ? ` and ${layer.nodes.length - 60} more` : "") : el("p", { class: "quiet" }, "TensorRT names no ONNX node for it.");
    $("layer-detail").replaceChildren(head, facts, nodes);
  }
  const pair = (name, value) => [el("dt", {}, name), el("dd", {}, value)];
  const goTo = (node, side) => window.dispatchEvent(new CustomEvent("show-node", { detail: { name: node, side: side === "fused" ? "after" : "before" } }));
  function choose(layer) {
    chosen = layer;
    const margin = (domain[1] - domain[0]) * 0.1;
    if (layer.x1 < domain[0] || layer.x2 > domain[1]) move(Math.max(0, layer.x1 - margin));
    redraw();
    tell(layer);
    $("layer-said").textContent = visible(`${layer.side}: ${layer.name}, ${layer.us.toFixed(2)} microseconds, ${layer.kind}`);
  }
  function move(start) {
    const span = domain[1] - domain[0];
    const from = Math.min(Math.max(0, start), total - span);
    domain = [from, from + span];
  }
  function zoom(factor, around = (domain[0] + domain[1]) / 2) {
    const span = Math.min(total, Math.max((domain[1] - domain[0]) / factor, total / 2000));
    const share = (around - domain[0]) / (domain[1] - domain[0]);
    domain = [around - share * span, around + (1 - share) * span];
    move(domain[0]);
    redraw();
  }
  let waiting = false;
  const soon = (work) => { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; work(); }); } };
  holder.addEventListener("wheel", (event) => {
    if (!plot) return;
    if (event.ctrlKey || event.shiftKey || document.activeElement === holder) {
      event.preventDefault();
      const around = plot.scale("x").invert(event.clientX - holder.getBoundingClientRect().left);
      soon(() => zoom(event.deltaY < 0 ? 1.25 : 0.8, around));
    }
  }, { passive: false });
  let drag = null;
  holder.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, from: domain[0], moved: false }; });
  holder.addEventListener("pointermove", (event) => {
    if (!plot) return;
    if (drag && event.buttons && Math.abs(event.clientX - drag.x) > 4) {
      drag.moved = true;
      const { clientX } = event;
      soon(() => { if (drag) { move(drag.from - ((clientX - drag.x) * (domain[1] - domain[0])) / (holder.clientWidth - 96)); redraw(); } });
    } else if (!chosen) {
      const layer = at(event);
      if (layer) tell(layer);
    }
  });
  holder.addEventListener("pointerup", (event) => {
    if (plot && drag && !drag.moved) {
      const layer = at(event);
      if (layer) choose(layer);
      else { chosen = null; redraw(); }
    }
    drag = null;
  });
  holder.addEventListener("keydown", (event) => {
    const lane = lanes[chosen?.side ?? "automatic"];
    const next = {
      ArrowRight: () => choose(chosen ? lane[Math.min(chosen.i + 1, lane.length - 1)] : lane[0]),
      ArrowLeft: () => choose(chosen ? lane[Math.max(chosen.i - 1, 0)] : lane[0]),
      ArrowDown: () => choose(across("fused")),
      ArrowUp: () => choose(across("automatic")),
      Home: () => choose(lane[0]), End: () => choose(lane[lane.length - 1]),
      "+": () => zoom(1.6), "=": () => zoom(1.6), "-": () => zoom(1 / 1.6), 0: () => { domain = [0, total]; redraw(); },
      Escape: () => { chosen = null; redraw(); },
      Enter: () => chosen?.nodes.length && goTo(chosen.nodes[0], chosen.side),
    }[event.key];
    if (next) { event.preventDefault(); next(); }
  });
  const across = (side) => (chosen ? lanes[side].find((l) => l.x2 > (chosen.x1 + chosen.x2) / 2) ?? lanes[side].at(-1) : lanes[side][0]);
  for (const button of document.querySelectorAll("[data-timeline]")) {
    button.addEventListener("click", () => ({ in: () => zoom(1.6), out: () => zoom(1 / 1.6), all: () => { domain = [0, total]; redraw(); } })[button.dataset.timeline]());
  }
}
