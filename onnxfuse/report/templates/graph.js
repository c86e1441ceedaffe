// The graph before and after. Groups (scopes, parts, regions, bodies) open and close; each is laid out by dagre on its own, from the
// inside out, so that opening one moves little and a large model is no slower than what is open of it. cytoscape draws.
const PAD = 14, HEAD = 24, LOOK = 48; // LOOK: so many boxes are open at first, or little more
const panes = {};
let searched = [];

const opName = (node) => node.op.replace(/^onnxfuse\./, "");
const nodeWord = (count) => `${count} node${count === 1 ? "" : "s"}`;

const pen = document.createElement("canvas").getContext("2d");
pen.font = '12.5px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const widths = new Map();
function textWidth(text) {
  if (!widths.has(text)) widths.set(text, pen.measureText(text).width);
  return widths.get(text);
}

// ------------------------------------------------------------------------------------------------------------- the tree
// Keys: "n12" is a node, "g3" a group, "root" all.
function treeOf(side) {
  const { nodes, groups, edges } = data.graph[side];
  const items = new Map([["root", { key: "root", children: [], nodes: 0, fused: new Map() }]]);
  groups.forEach((group, i) => items.set(`g${i}`, { key: `g${i}`, group, children: [], nodes: 0, fused: new Map(), parent: "parent" in group ? `g${group.parent}` : "root" }));
  nodes.forEach((node, i) => items.set(`n${i}`, { key: `n${i}`, node, i, parent: "group" in node ? `g${node.group}` : "root" }));
  const order = new Map(); // children stand where their first node stands
  for (const item of items.values()) {
    if (!item.node) continue;
    item.path = [];
    for (let key = item.parent; key !== "root"; key = items.get(key).parent) item.path.unshift(key);
    for (const key of ["root", ...item.path]) {
      const group = items.get(key);
      if (!order.has(key)) order.set(key, item.i);
      if (item.node.kind) continue;
      group.nodes += 1;
      const site = sites[item.node.site];
      if (site?.decision === "fused") group.fused.set(site.fusion, (group.fused.get(site.fusion) ?? 0) + 1);
    }
    order.set(item.key, item.i);
  }
  for (const item of items.values()) if (item.parent) items.get(item.parent).children.push(item.key);
  for (const item of items.values()) item.children?.sort((a, b) => (order.get(a) ?? 0) - (order.get(b) ?? 0));
  // Each edge belongs to the innermost group that holds both of its ends, between two of that group's children.
  const between = new Map();
  const into = nodes.map(() => []), outOf = nodes.map(() => []);
  for (const [from, to, which] of edges) {
    into[to].push([from, which]);
    outOf[from].push([to, which]);
    const [a, b] = [items.get(`n${from}`), items.get(`n${to}`)];
    let depth = 0;
    while (depth < a.path.length && depth < b.path.length && a.path[depth] === b.path[depth]) depth += 1;
    const holder = depth ? a.path[depth - 1] : "root";
    const [ka, kb] = [a.path[depth] ?? a.key, b.path[depth] ?? b.key];
    if (!between.has(holder)) between.set(holder, new Map());
    if (ka !== kb) between.get(holder).set(`${ka}>${kb}`, [ka, kb]);
  }
  return { side, items, nodes, groups, edges, between, into, outOf };
}

function labelOf(item) {
  if (item.node) return item.node.kind ? cut(visible(item.node.name), 26) : cut(visible(opName(item.node)), 28);
  return `${cut(visible(item.group.label.split(" of ")[0]), 30)} · ${item.nodes}`;
}
function boxOf(item) {
  const label = labelOf(item);
  return { w: Math.max(52, Math.ceil(textWidth(label)) + (item.node ? 22 : 30)), h: item.node ? 26 : 32 };
}

// At first: the way down to where something was decided, one example of it open, and as much around it as one can look at. Regions
// stay closed: they are what is compared.
function firstOpen(tree) {
  const open = new Set(["root"]);
  const all = tree.items.get("root").nodes;
  const closed = () => [...open].flatMap((key) => tree.items.get(key).children).filter((key) => key[0] === "g" && !open.has(key) && tree.items.get(key).group.kind !== "region");
  const boxes = () => [...open].reduce((sum, key) => sum + tree.items.get(key).children.length - 1, 1);
  const decided = tree.nodes.findIndex((node) => sites[node.site]?.decision === "fused");
  const path = decided >= 0 ? tree.items.get(`n${decided}`).path.filter((key) => tree.items.get(key).group.kind !== "region") : [];
  path.forEach((key) => open.add(key));
  for (let more = true; more;) {
    more = false;
    for (const key of closed()) {
      const item = tree.items.get(key);
      const wanted = item.nodes > 0.8 * all || !path.length || item.fused.size;
      if (wanted && boxes() + item.children.length - 1 <= LOOK) { open.add(key); more = true; }
    }
  }
  return open;
}
// The same groups as on the other side.
function openLike(tree, other, open) {
  const names = new Set([...open].map((key) => labelsOf(other, key)));
  return new Set([...tree.items.keys()].filter((key) => key === "root" || (key[0] === "g" && names.has(labelsOf(tree, key)))));
}
function labelsOf(tree, key) {
  const found = [];
  for (let up = key; up && up !== "root"; up = tree.items.get(up).parent) found.push(tree.items.get(up).group.label);
  return found.join("\n");
}

// --------------------------------------------------------------------------------------------------------------- layout
// Layers of a model are alike: what has the same boxes and edges is laid out once.
const alike = new Map();
function layoutOf(tree, open, kept, key) {
  if (kept.has(key)) return kept.get(key);
  const { children } = tree.items.get(key);
  const boxes = children.map((child) => {
    const item = tree.items.get(child), box = boxOf(item);
    if (item.node || !open.has(child)) return box;
    const inner = layoutOf(tree, open, kept, child);
    return { w: Math.max(inner.w + 2 * PAD, box.w + 20), h: inner.h + PAD + HEAD + 6 };
  });
  const place = new Map(children.map((child, i) => [child, i]));
  const edges = [...(tree.between.get(key)?.values() ?? [])].map(([a, b]) => [place.get(a), place.get(b)]);
  const look = `${boxes.map((box) => `${box.w}x${box.h}`)}|${edges.join(" ")}`;
  if (!alike.has(look)) alike.set(look, placed(boxes, edges));
  const { at, routes, w, h } = alike.get(look);
  const result = { places: new Map(children.map((child, i) => [child, at[i]])), routes: new Map(edges.map(([a, b], i) => [`${children[a]}>${children[b]}`, routes[i]])), w, h };
  kept.set(key, result);
  return result;
}
function placed(boxes, edges) {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 26, ranker: "tight-tree" });
  graph.setDefaultEdgeLabel(() => ({}));
  boxes.forEach((box, i) => graph.setNode(String(i), { width: box.w, height: box.h }));
  for (const [a, b] of edges) graph.setEdge(String(a), String(b));
  if (boxes.length) dagre.layout(graph);
  return { at: boxes.map((_, i) => graph.node(String(i))), routes: edges.map(([a, b]) => graph.edge(String(a), String(b)).points), w: graph.graph().width || 0, h: graph.graph().height || 0 };
}

function elementsOf(tree, open, kept) {
  const found = [], at = new Map(), origin = new Map();
  const walk = (key, dx, dy, depth) => {
    const inside = layoutOf(tree, open, kept, key);
    origin.set(key, [dx, dy]);
    for (const child of tree.items.get(key).children) {
      const item = tree.items.get(child), { x, y, width: w, height: h } = inside.places.get(child);
      const opened = !item.node && open.has(child);
      at.set(child, { x: x + dx, y: y + dy, w, h });
      found.push({ group: "nodes", data: { id: child, label: labelOf(item), w, h, ...lookOf(item, opened), z: depth * 2 + (item.node ? 1 : 0) }, position: { x: x + dx, y: y + dy }, classes: classesOf(item, opened) });
      if (opened) {
        const inner = layoutOf(tree, open, kept, child);
        walk(child, x + dx - inner.w / 2, y + dy - h / 2 + HEAD + 6, depth + 1);
      }
    }
  };
  walk("root", 0, 0, 0);
  const seen = (i) => tree.items.get(`n${i}`).path.find((key) => !open.has(key)) ?? `n${i}`;
  const done = new Set();
  for (const [from, to] of tree.edges) {
    const [a, b] = [seen(from), seen(to)];
    if (a === b || done.has(`${a}>${b}`)) continue;
    done.add(`${a}>${b}`);
    found.push({ group: "edges", data: { id: `${a}>${b}`, source: a, target: b, ...routeOf(tree, kept, origin, at, from, to, a, b) } });
  }
  return found;
}

// The bends that dagre gave an edge, in cytoscape's terms: how far along, and how far beside, the straight line.
function routeOf(tree, kept, origin, at, from, to, a, b) {
  const [pa, pb] = [tree.items.get(`n${from}`), tree.items.get(`n${to}`)];
  let depth = 0;
  while (depth < pa.path.length && depth < pb.path.length && pa.path[depth] === pb.path[depth]) depth += 1;
  const holder = depth ? pa.path[depth - 1] : "root";
  const [ka, kb] = [pa.path[depth] ?? pa.key, pb.path[depth] ?? pb.key];
  const points = kept.get(holder)?.routes.get(`${ka}>${kb}`);
  const crossing = ka === a && kb === b ? {} : { crossing: 1 };
  if (!points) return { bent: 0, ...crossing };
  const [dx, dy] = origin.get(holder);
  const bends = points.slice(ka === a ? 1 : 0, kb === b ? -1 : undefined).map((p) => ({ x: p.x + dx, y: p.y + dy }));
  const [s, t] = [at.get(a), at.get(b)];
  const [vx, vy] = [t.x - s.x, t.y - s.y];
  const length = Math.hypot(vx, vy) || 1;
  const beside = bends.map((p) => ((p.y - s.y) * vx - (p.x - s.x) * vy) / length);
  if (beside.every((d) => Math.abs(d) < 2)) return { bent: 0, ...crossing };
  return { bent: 1, ...crossing, weights: bends.map((p) => ((p.x - s.x) * vx + (p.y - s.y) * vy) / (length * length)), distances: beside };
}

// ----------------------------------------------------------------------------------------------------------------- looks
function classesOf(item, opened) {
  if (opened) return `open ${item.group.kind}`;
  if (item.node?.kind) return "end";
  const site = item.node ? sites[item.node.site] : sites[item.group.site];
  return `${item.node ? "node" : "closed"} ${site ? site.decision : ""}`;
}
let paint = {};
const mixed = (colour, share) => d3.rgb(d3.interpolateRgb(paint["--paper"], colour)(share)).formatHex();
function readPaint() {
  const names = ["--paper", "--ink", "--quiet", "--line", "--soft", "--accent", "--ground", "--bar", "--edge"];
  paint = Object.fromEntries(names.map((name) => [name, resolved(name)]));
  paint.fusion = new Map(fusions.map((fusion) => [fusion, resolved(colourOf(fusion))]));
  paint.soft = new Map([...paint.fusion].map(([fusion, colour]) => [fusion, mixed(colour, 0.26)]));
}
function lookOf(item, opened) {
  const site = item.node ? sites[item.node.site] : sites[item.group.site];
  const strong = site ? paint.fusion.get(site.fusion) : paint["--bar"];
  if (opened) return { fill: site ? mixed(strong, 0.1) : paint["--ground"], edge: site ? strong : paint["--line"] };
  if (site) return { fill: site.decision === "fused" ? paint.soft.get(site.fusion) : paint["--paper"], edge: strong };
  if (!item.node && item.fused.size) {
    // A closed group says by hard stripes how much of it is fused, and by what.
    const stops = [], colours = [];
    let share = 0;
    for (const [fusion, count] of item.fused) {
      const next = share + (100 * count) / item.nodes;
      stops.push(`${share}%`, `${next}%`);
      colours.push(paint.soft.get(fusion), paint.soft.get(fusion));
      share = next;
    }
    stops.push(`${share}%`, "100%");
    colours.push(paint["--soft"], paint["--soft"]);
    return { fill: paint["--soft"], edge: paint["--bar"], stops: stops.join(" "), colours: colours.join(" ") };
  }
  return { fill: item.node ? paint["--paper"] : paint["--soft"], edge: paint["--bar"] };
}
const stylesheet = () => [
  { selector: "node", style: { shape: "round-rectangle", width: "data(w)", height: "data(h)", label: "data(label)", "background-color": "data(fill)", "border-width": 1.2, "border-color": "data(edge)", color: paint["--ink"], "font-size": 12.5, "font-family": 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif', "text-valign": "center", "text-halign": "center", "z-index": "data(z)", "min-zoomed-font-size": 5, "corner-radius": 6 } },
  { selector: "node.fused", style: { "border-width": 2 } },
  { selector: "node.kept", style: { "border-style": "dashed", "border-width": 2 } },
  { selector: "node.end", style: { shape: "round-tag", "background-color": paint["--soft"], color: paint["--quiet"] } },
  { selector: "node.closed", style: { "font-weight": 600, "border-width": 1.6, "corner-radius": 9 } },
  { selector: "node[stops]", style: { "background-fill": "linear-gradient", "background-gradient-direction": "to-right", "background-gradient-stop-colors": (n) => n.data("colours"), "background-gradient-stop-positions": (n) => n.data("stops") } },
  { selector: "node.open", style: { "text-valign": "top", "text-margin-y": HEAD - 4, "text-margin-x": (n) => textWidth(n.data("label")) * 0.46 + 12 - n.data("w") / 2, "font-size": 11.5, color: paint["--quiet"], "border-width": 1, "corner-radius": 10 } },
  { selector: "node.subgraph", style: { "border-style": "dashed" } },
  { selector: "edge", style: { width: 1.2, "line-color": paint["--edge"], "target-arrow-color": paint["--edge"], "target-arrow-shape": "triangle", "arrow-scale": 0.75, "curve-style": "straight", "z-index": 50, "z-index-compare": "manual", "edge-distances": "node-position" } },
  { selector: "edge[bent = 1]", style: { "curve-style": "round-segments", "segment-weights": "data(weights)", "segment-distances": "data(distances)", "segment-radii": 10 } },
  { selector: "edge[crossing = 1]", style: { "line-opacity": 0.4 } }, // into or out of an open group, straight through what is in it
  { selector: "node", style: { "z-index-compare": "manual" } },
  { selector: "node.node, node.closed, node.end", style: { "z-index": 60 } },
  { selector: "edge.near", style: { "line-opacity": 1, "line-color": paint["--accent"], "target-arrow-color": paint["--accent"], width: 2.2, "z-index": 70 } },
  { selector: "node.found", style: { "border-color": paint["--accent"], "border-width": 2.5, "border-style": "solid" } },
  { selector: "node.twin", style: { "outline-width": 3, "outline-color": paint["--accent"], "outline-opacity": 0.45, "outline-offset": 2 } },
  { selector: "node.chosen", style: { "border-color": paint["--accent"], "border-width": 3, "border-style": "solid", "outline-width": 3, "outline-color": paint["--accent"], "outline-opacity": 0.35, "outline-offset": 2 } },
];

// ----------------------------------------------------------------------------------------------------------------- panes
class Pane {
  constructor(holder) {
    this.side = holder.closest(".pane").dataset.side;
    this.holder = holder;
    this.tree = treeOf(this.side);
    this.open = this.firstOpen();
    this.kept = new Map();
    this.chosen = null;
    this.cy = cytoscape({ container: holder, style: stylesheet(), layout: { name: "preset" }, minZoom: 0.005, maxZoom: 3, autoungrabify: true, boxSelectionEnabled: false, selectionType: "single", hideEdgesOnViewport: false, pixelRatio: Math.min(2, devicePixelRatio || 1) });
    this.cy.on("tap", "node", (event) => this.choose(event.target.id(), true));
    this.cy.on("dbltap", "node", (event) => this.toggle(event.target.id()));
    this.cy.on("tap", (event) => { if (event.target === this.cy) this.clear(); });
    holder.addEventListener("keydown", (event) => this.key(event));
    // The page scrolls past a graph that is not in use; a pinch, or the wheel with a key held or after a click, zooms.
    this.cy.userZoomingEnabled(false);
    holder.addEventListener("wheel", (event) => {
      if (!(event.ctrlKey || event.metaKey || document.activeElement === holder)) return;
      event.preventDefault();
      const box = holder.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), { x: event.clientX - box.left, y: event.clientY - box.top });
    }, { passive: false });
    holder.addEventListener("pointerdown", () => holder.focus({ preventScroll: true }));
    this.show();
    this.first();
  }
  firstOpen() {
    const other = panes.before;
    const like = other && other !== this ? openLike(this.tree, other.tree, other.open) : new Set();
    return like.size > 1 ? like : firstOpen(this.tree);
  }
  show() {
    this.cy.batch(() => {
      this.cy.elements().remove();
      this.cy.add(elementsOf(this.tree, this.open, this.kept));
    });
    this.mark();
  }
  mark() {
    this.cy.batch(() => {
      this.cy.elements(".chosen, .near, .twin, .found").removeClass("chosen near twin found");
      for (const { side, key } of searched) if (side === this.side) this.cy.getElementById(this.seen(key)).addClass("found");
      if (this.chosen) {
        const node = this.cy.getElementById(this.seen(this.chosen)).addClass("chosen");
        node.connectedEdges().addClass("near");
      }
      for (const key of this.twins ?? []) this.cy.getElementById(this.seen(key)).addClass("twin");
    });
  }
  // Of the boxes alone: cytoscape would measure every label and bend, for seconds in a large graph.
  extent() {
    const box = { x1: 0, y1: 0, x2: 1, y2: 1 };
    for (const [i, node] of this.cy.nodes().toArray().entries()) {
      const { x, y } = node.position(), { w, h } = node.data();
      const here = { x1: x - w / 2, y1: y - h / 2, x2: x + w / 2, y2: y + h / 2 };
      for (const end of ["x1", "y1", "x2", "y2"]) box[end] = i ? Math[end.endsWith("1") ? "min" : "max"](box[end], here[end]) : here[end];
    }
    return { ...box, w: box.x2 - box.x1, h: box.y2 - box.y1 };
  }
  fit() {
    const box = this.extent();
    const [w, h] = [this.cy.width(), this.cy.height()];
    const zoom = Math.min(1.5, (w - 32) / box.w, (h - 32) / box.h);
    this.cy.viewport({ zoom, pan: { x: w / 2 - (zoom * (box.x1 + box.x2)) / 2, y: h / 2 - (zoom * (box.y1 + box.y2)) / 2 } });
  }
  // At first all of it where the text stays readable, else the upper end, or the first thing that was fused.
  first() {
    const box = this.extent();
    const [w, h] = [this.cy.width(), this.cy.height()];
    const zoom = Math.min(1, Math.max(Math.min((w - 24) / box.w, (h - 24) / box.h), 0.62));
    const wide = box.w * zoom > w, tall = box.h * zoom > h;
    const fused = this.cy.nodes(".fused").sort((a, b) => a.position("y") - b.position("y"));
    const at = fused.nonempty() ? fused[0].position() : { x: (box.x1 + box.x2) / 2, y: box.y1 };
    const x = wide ? w / 2 - zoom * at.x : w / 2 - (zoom * (box.x1 + box.x2)) / 2;
    const y = tall ? Math.min(14 - zoom * box.y1, h * 0.3 - zoom * at.y) : h / 2 - (zoom * (box.y1 + box.y2)) / 2;
    this.cy.viewport({ zoom, pan: { x, y } });
  }
  seen(key) {
    const item = this.tree.items.get(key);
    const path = item.path ?? this.pathOf(key);
    return path.find((group) => !this.open.has(group)) ?? key;
  }
  pathOf(key) {
    const path = [];
    for (let up = this.tree.items.get(key).parent; up && up !== "root"; up = this.tree.items.get(up).parent) path.unshift(up);
    return path;
  }
  forget(key) {
    for (const up of [...this.pathOf(key), key, "root"]) this.kept.delete(up);
  }
  toggle(key) {
    const item = this.tree.items.get(key);
    if (item.node) return;
    const before = this.cy.getElementById(key).renderedPosition();
    if (this.open.has(key)) this.open.delete(key);
    else this.open.add(key);
    this.forget(key);
    this.show();
    const after = this.cy.getElementById(key).renderedPosition(); // what was opened stays under the pointer
    this.cy.panBy({ x: before.x - after.x, y: before.y - after.y });
    this.choose(key, true);
  }
  reveal(key) {
    const closed = this.pathOf(key).filter((group) => !this.open.has(group));
    if (closed.length) {
      closed.forEach((group) => this.open.add(group));
      this.forget(key);
      this.show();
    }
  }
  centre(key) {
    const node = this.cy.getElementById(this.seen(key));
    if (node.empty()) return;
    const zoom = Math.max(this.cy.zoom(), 0.75);
    const position = node.position();
    const pan = { x: this.cy.width() / 2 - position.x * zoom, y: this.cy.height() / 2 - position.y * zoom };
    if (calm.matches) this.cy.viewport({ zoom, pan });
    else this.cy.stop().animate({ zoom, pan }, { duration: 220 });
  }
  clear() {
    for (const pane of Object.values(panes)) { pane.chosen = null; pane.twins = []; pane.mark(); }
  }
  choose(key, byHand = false) {
    this.clear();
    this.chosen = key;
    this.mark();
    const other = panes[this.side === "before" ? "after" : "before"];
    if (other) {
      other.twins = twinsOf(this, key, other);
      other.mark();
      if (other.twins.length && byHand) other.centre(other.twins[0]);
    }
    tell(this, key);
  }
  zoom(factor, around = { x: this.cy.width() / 2, y: this.cy.height() / 2 }) {
    this.cy.zoom({ level: this.cy.zoom() * factor, renderedPosition: around });
  }
  key(event) {
    const step = (pick) => {
      if (!this.chosen) return this.go(this.tree.items.get("root").children[0]);
      const here = this.cy.getElementById(this.seen(this.chosen));
      const next = pick(here);
      if (next) this.go(next);
    };
    const edge = (nodes) => nodes.sort((a, b) => a.position("x") - b.position("x"))[0]?.id();
    const along = (way) => (here) => {
      const row = this.cy.nodes(":inside").filter((n) => !n.hasClass("open")).sort((a, b) => a.position("y") - b.position("y") || a.position("x") - b.position("x"));
      const ids = row.map((n) => n.id());
      return ids[ids.indexOf(here.id()) + way];
    };
    const act = {
      ArrowDown: () => step((here) => edge(here.outgoers("node")) ?? along(1)(here)),
      ArrowUp: () => step((here) => edge(here.incomers("node")) ?? along(-1)(here)),
      ArrowRight: () => step(along(1)),
      ArrowLeft: () => step(along(-1)),
      Enter: () => this.chosen && this.toggle(this.seen(this.chosen)),
      Backspace: () => this.chosen && this.pathOf(this.chosen).length && this.go(this.pathOf(this.chosen).at(-1)),
      Escape: () => { this.clear(); empty(); },
      "+": () => this.zoom(1.3), "=": () => this.zoom(1.3), "-": () => this.zoom(1 / 1.3), 0: () => this.fit(),
    }[event.key];
    if (act && !event.ctrlKey && !event.metaKey && !event.altKey) { event.preventDefault(); act(); }
  }
  go(key, both = false) {
    this.reveal(key);
    this.choose(key);
    this.centre(key);
    const other = panes[this.side === "before" ? "after" : "before"];
    if (both && other?.twins.length) { other.reveal(other.twins[0]); other.mark(); other.centre(other.twins[0]); }
  }
}

// The same place on the other side: nodes of the same site, or the node of the same name.
function twinsOf(pane, key, other) {
  const item = pane.tree.items.get(key);
  const site = item.node ? item.node.site : item.group.site;
  if (site !== undefined) {
    const region = other.tree.groups.findIndex((group) => group.site === site);
    if (region >= 0) return [`g${region}`];
    return other.tree.nodes.flatMap((node, i) => (node.site === site ? [`n${i}`] : []));
  }
  if (item.node) {
    const i = other.tree.nodes.findIndex((node) => node.name === item.node.name && node.op === item.node.op);
    return i >= 0 ? [`n${i}`] : [];
  }
  const wanted = labelsOf(pane.tree, key);
  const same = other.tree.groups.findIndex((_, i) => labelsOf(other.tree, `g${i}`) === wanted);
  return same >= 0 ? [`g${same}`] : [];
}

// ---------------------------------------------------------------------------------------------------------------- telling
const layersOf = new Map();
for (const side of ["automatic", "fused"]) for (const layer of data.layers?.[side] ?? []) for (const node of layer.nodes) {
  if (!layersOf.has(node)) layersOf.set(node, []);
  layersOf.get(node).push({ ...layer, side });
}
const tensorOf = new Map((data.tensors ?? []).map((tensor) => [tensor.name, tensor]));
function empty() {
  $("node-detail").replaceChildren(el("p", { class: "quiet" }, "Click a node: its inputs and outputs, what was decided about it, and why. A double click or Enter opens a group."));
}
function tell(pane, key) {
  const item = pane.tree.items.get(key);
  const site = sites[item.node ? item.node.site : item.group.site];
  const open = (text, target) => el("button", { type: "button", class: "link", onclick: () => pane.go(target) }, text);
  const parts = [];
  const row = (name, ...value) => value.flat().filter((v) => v !== null && v !== undefined && v !== "").length ? [el("dt", {}, name), el("dd", {}, ...value)] : [];
  const node = item.node;
  parts.push(el("p", { class: "what" }, el("b", {}, node ? (node.kind ? `Graph ${node.kind}` : opName(node)) : { scope: "Scope", part: "Part", region: "Site", subgraph: "Body" }[item.group.kind]), el("span", { class: "quiet" }, ` ${pane.side}`)));
  if (node || item.group.kind !== "region") parts.push(el("p", {}, el("code", {}, node ? node.name : item.group.label)));
  if (site) parts.push(decision(site, pane));
  const facts = [];
  if (node) {
    facts.push(...row("inputs", pane.tree.into[item.i].map(([from, which]) => line(open(pane.tree.nodes[from].outputs[which]?.[0] ?? pane.tree.nodes[from].name, `n${from}`), pane.tree.nodes[from].outputs[which]?.[1]))));
    facts.push(...row("weights", (node.constants ?? []).map((text) => line(text))));
    facts.push(...row("outputs", node.outputs.map(([name, type], which) => el("div", {}, el("code", {}, name), " ", el("span", { class: "quiet" }, type), error(name), el("div", { class: "readers" }, ...pane.tree.outOf[item.i].filter(([, w]) => w === which).slice(0, 12).map(([to]) => open(pane.tree.nodes[to].kind ? "output" : opName(pane.tree.nodes[to]), `n${to}`)))))));
    facts.push(...row("attributes", Object.entries(node.attributes ?? {}).map(([name, value]) => line(`${name}: ${value}`))));
    const layers = layersOf.get(node.name) ?? [];
    facts.push(...row("engine layers", layers.map((layer) => line(`${layer.side}: ${cut(visible(layer.name), 60)}, ${layer.us.toFixed(2)} µs`))));
  } else {
    facts.push(...row("holds", nodeWord(item.nodes)));
    facts.push(...row("fused", [...item.fused].map(([fusion, count]) => line(`${fusion}: ${nodeWord(count)}`))));
    parts.push(el("p", {}, el("button", { type: "button", onclick: () => pane.toggle(key) }, pane.open.has(key) ? "Close" : "Open")));
  }
  parts.push(el("dl", { class: "pairs" }, facts));
  $("node-detail").replaceChildren(...parts);
  const said = node ? `${node.kind ? `graph ${node.kind}` : opName(node)} ${node.name}` : `${item.group.kind} ${item.group.label}, ${nodeWord(item.nodes)}, ${pane.open.has(key) ? "open" : "closed"}`;
  $("node-said").textContent = visible(`${said}${site ? `, ${site.decision} by ${site.fusion}: ${site.reason}` : ""}`);
}
const line = (...content) => el("div", {}, ...content.flatMap((c, i) => (i && c ? [" ", el("span", { class: "quiet" }, c)] : [c])));
function error(name) {
  const tensor = tensorOf.get(name);
  return tensor ? el("div", { class: tensor.agrees === false ? "no" : "quiet" }, `error: max abs ${figure(tensor.max_abs ?? tensor.fused?.max_abs)}${tensor.agrees === false ? ", differs" : ""}`) : null;
}
function decision(site, pane) {
  // The nodes of the source: a site may name what an earlier fusion made of some of them.
  const own = data.graph.before?.nodes.filter((node) => sites[node.site] === site).map((node) => node.name) ?? [];
  const names = [...new Set(own.length ? own : site.nodes)];
  const other = { before: "after", after: "before" }[pane.side];
  const link = site.node && other === "after" && panes.after ? el("button", { type: "button", class: "link", onclick: () => showNode(site.node, "after") }, site.node) : site.node ? el("code", {}, site.node) : null;
  return el("div", { class: "decision", style: `--c: ${colourOf(site.fusion)}` },
    el("p", {}, el("span", { class: `chip ${site.decision}` }, site.decision), " ", el("b", {}, site.fusion), site.variant ? ` (${site.variant})` : ""),
    el("p", {}, site.reason),
    link ? el("p", { class: "quiet" }, site.decision === "fused" ? "became " : "", link) : null,
    el("details", {}, el("summary", {}, `made of ${nodeWord(names.length)}`), el("ul", {}, names.map((name) => el("li", {}, panes.before ? el("button", { type: "button", class: "link", onclick: () => showNode(name, "before") }, name) : el("code", {}, name))))),
  );
}
function showNode(name, side) {
  start();
  for (const pane of [panes[side], ...Object.values(panes)].filter(Boolean)) {
    const i = pane.tree.nodes.findIndex((node) => !node.kind && (node.name === name || node.outputs[0]?.[0] === name));
    if (i >= 0) {
      if (pane.holder.closest(".pane").hidden) showSides("both");
      pane.go(`n${i}`, true);
      $("graph").scrollIntoView({ behavior: calm.matches ? "auto" : "smooth", block: "start" });
      return;
    }
  }
}
addEventListener("show-node", ({ detail }) => showNode(detail.name, detail.side));

// ----------------------------------------------------------------------------------------------------------------- search
function find(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  return Object.values(panes).flatMap((pane) => pane.tree.nodes.flatMap((node, i) => {
    const site = sites[node.site];
    const all = `${node.name} ${opName(node)} ${node.outputs.map((o) => o[0]).join(" ")} ${site ? `${site.fusion} ${site.decision}` : ""}`.toLowerCase();
    return words.every((word) => all.includes(word)) ? [{ side: pane.side, key: `n${i}`, node, site }] : [];
  }));
}
function search() {
  start();
  searched = find($("find").value);
  const list = $("results");
  const count = searched.length;
  $("found-count").textContent = $("find").value.trim() ? (count ? `${count} found${count > 50 ? ", the first 50 are listed" : ""}` : "nothing found") : "";
  list.hidden = !count;
  list.replaceChildren(...searched.slice(0, 50).map(({ side, key, node, site }) => el("li", {},
    el("button", { type: "button", class: "link", onclick: () => { showSides("both"); panes[side].go(key, true); } }, el("b", {}, opName(node) || node.kind), " ", node.name),
    el("span", { class: "quiet" }, ` ${side}${site ? `, ${site.decision} by ${site.fusion}` : ""}`))));
  for (const pane of Object.values(panes)) pane.mark();
}

// --------------------------------------------------------------------------------------------------------------- starting
function showSides(which) {
  const buttons = document.querySelectorAll("[data-show]");
  for (const figure of document.querySelectorAll(".pane")) figure.hidden = which !== "both" && figure.dataset.side !== which;
  pressed(buttons, [...buttons].find((button) => button.dataset.show === which));
  for (const pane of Object.values(panes)) pane.cy.resize();
}
let started = false;
function start() {
  if (started) return;
  started = true;
  performance.mark("graph-start");
  readPaint();
  for (const holder of document.querySelectorAll(".canvas")) { const pane = new Pane(holder); panes[pane.side] = pane; }
  const [first] = Object.values(panes);
  const fused = first.cy.nodes(".fused").sort((a, b) => a.position("y") - b.position("y"));
  if (fused.nonempty()) first.choose(fused[0].id(), true); // shows what a click tells
  performance.measure("graph", "graph-start");
}
function repaint() {
  if (!started) return;
  readPaint();
  for (const pane of Object.values(panes)) { pane.cy.style(stylesheet()); pane.show(); }
}
function nodeTable() {
  const holder = $("node-list").querySelector(".inner");
  const most = 2000;
  const table = (side) => {
    const rows = data.graph[side].nodes.filter((node) => !node.kind);
    return [el("h3", {}, side === "before" ? "Before" : "After"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Nodes ${side}` }, el("table", {},
      el("thead", {}, el("tr", {}, ["node", "operator", "decision", "fusion", "reason"].map((title) => el("th", { scope: "col" }, title)))),
      el("tbody", {}, rows.slice(0, most).map((node) => {
        const site = sites[node.site];
        return el("tr", {}, el("th", { scope: "row" }, el("button", { type: "button", class: "link", onclick: () => showNode(node.name, side) }, node.name)), el("td", {}, opName(node)), el("td", {}, site?.decision ?? "–"), el("td", {}, site?.fusion ?? ""), el("td", {}, site?.reason ?? ""));
      })))), rows.length > most ? el("p", { class: "quiet" }, `${rows.length - most} more are in the JSON report.`) : null];
  };
  holder.replaceChildren(...["before", "after"].filter((side) => data.graph[side]).flatMap(table).filter(Boolean));
}

if (data.graph) {
  const there = [...new Set(sites.map((site) => site.fusion))].filter((fusion) => ["before", "after"].some((side) => data.graph[side]?.nodes.some((node) => sites[node.site]?.fusion === fusion)));
  $("legend-graph").append(...there.map((fusion) => swatch(colourOf(fusion), fusion)), ...(sites.some((site) => site.decision === "kept") ? [swatch("var(--quiet)", "left to TensorRT", "kept")] : []));
  whenNear($("panes"), start);
  let typing = 0;
  $("find").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(search, 120); });
  $("find").addEventListener("keydown", (event) => {
    if (event.key === "Enter") { clearTimeout(typing); search(); if (searched.length) panes[searched[0].side].go(searched[0].key, true); }
    if (event.key === "Escape") { $("find").value = ""; search(); }
    if (event.key === "ArrowDown" && !$("results").hidden) { event.preventDefault(); $("results").querySelector("button")?.focus(); }
  });
  for (const button of document.querySelectorAll("[data-show]")) button.addEventListener("click", () => { start(); showSides(button.dataset.show); });
  for (const button of document.querySelectorAll("[data-view]")) {
    button.addEventListener("click", () => {
      start();
      for (const pane of Object.values(panes)) ({
        in: () => pane.zoom(1.3), out: () => pane.zoom(1 / 1.3), fit: () => pane.fit(),
        expand: () => { for (const key of pane.tree.items.keys()) if (key[0] === "g") pane.open.add(key); pane.kept.clear(); pane.show(); pane.first(); },
        collapse: () => { pane.open = pane.firstOpen(); pane.kept.clear(); pane.show(); pane.first(); },
      })[button.dataset.view]();
    });
  }
  $("node-list").addEventListener("toggle", () => { if ($("node-list").open && !$("node-list").querySelector("table")) nodeTable(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  // Paper is white, whatever the screen is, and shows all that is open as a picture.
  addEventListener("beforeprint", () => {
    start();
    document.documentElement.classList.add("paper");
    repaint();
    for (const pane of Object.values(panes)) {
      const picture = el("img", { class: "picture", alt: `The graph ${pane.side}, as it was open on the screen`, src: pane.cy.png({ full: true, maxWidth: 1600, maxHeight: 2400, bg: paint["--paper"] }) });
      pane.holder.after(picture);
    }
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("paper");
    for (const picture of document.querySelectorAll(".picture")) picture.remove();
    repaint();
  });
}
