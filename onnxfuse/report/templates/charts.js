// Charts of single figures, drawn by Plot; each stands above a table that holds the same.
const VERDICT = { faster: "var(--good)", slower: "var(--bad)", draw: "var(--bar)", baseline: "var(--bar)" };
const base = { style: { fontSize: "12.5px", fontFamily: "inherit", background: "none", overflow: "visible" } };
const interval = (r) => `${r.median.toFixed(3)}× [${r.low.toFixed(3)}, ${r.high.toFixed(3)}]`;
const engineNames = (names, width) => (name) => cut(visible(name), Math.max(10, Math.floor(width / 12)));

if (data.timings) {
  const { engines, ratios, baseline } = data.timings;
  const bars = Object.entries(engines).map(([name, e]) => ({ name, ...e, verdict: ratios[name]?.verdict ?? "baseline", ratio: ratios[name] }));
  bars.sort((a, b) => (b.name === baseline) - (a.name === baseline));
  const names = bars.map((bar) => bar.name);
  chart("chart-latency", (width) => Plot.plot({
    ...base, width, height: 34 + bars.length * 62, marginLeft: 18, marginRight: 150, marginTop: 6, marginBottom: 34,
    x: { label: "milliseconds", zero: true, ticks: 5, grid: true, domain: [0, d3.max(bars, (b) => b.high) * 1.02], insetRight: 0 },
    y: { domain: names, axis: null, padding: 0.1 },
    marks: [
      Plot.barX(bars, { x: "median", y: "name", fill: (b) => VERDICT[b.verdict], insetTop: 22, insetBottom: 6, rx: 3 }),
      Plot.ruleY(bars, { x1: "low", x2: "high", y: "name", stroke: "var(--ink)", strokeWidth: 1.5, dy: 8 }),
      Plot.tickX(bars.flatMap((b) => [b.low, b.high].map((x) => ({ name: b.name, x }))), { x: "x", y: "name", stroke: "var(--ink)", strokeWidth: 1.5, insetTop: 27, insetBottom: 11 }),
      Plot.text(bars, { x: 0, y: "name", text: (b) => cut(visible(b.name), 60), textAnchor: "start", frameAnchor: "top", dy: -18, fill: "var(--ink)", fontWeight: 600 }),
      Plot.text(bars, { x: "high", y: "name", text: (b) => `${Number(b.median.toPrecision(4))} ms`, textAnchor: "start", dx: 10, dy: 8, fill: "var(--ink)" }),
    ],
  }));
  const compared = bars.filter((bar) => bar.ratio).map((bar) => ({ name: bar.name, ...bar.ratio }));
  chart("chart-ratio", (width) => forest(compared, width));
}

// Ratios with their intervals around 1.
function forest(rows, width) {
  const left = Math.min(320, Math.max(110, d3.max(rows, (r) => r.name.length) * 7.2 + 16), width * 0.45);
  const ends = [...rows.flatMap((r) => [r.low, r.high]), 1];
  const [low, high] = d3.extent(ends);
  const room = Math.max((high - low) * 0.12, 0.005);
  const narrow = width < 640;
  return Plot.plot({
    ...base, width, height: 52 + rows.length * 28, marginLeft: left, marginRight: narrow ? 20 : 216, marginTop: 22, marginBottom: 34,
    x: { label: "← slower · ratio · faster →", labelAnchor: "center", domain: [low - room, high + room], grid: true, ticks: Math.max(3, width / 140), tickFormat: (x) => `${Number(x.toFixed(3))}×` },
    y: { domain: rows.map((r) => r.name), label: null, tickSize: 0, tickFormat: (n) => cut(visible(n), Math.floor(left / 7)) },
    marks: [
      Plot.ruleX([1], { stroke: "var(--ink)", strokeWidth: 1.25 }),
      Plot.ruleY(rows, { x1: "low", x2: "high", y: "name", stroke: (r) => VERDICT[r.verdict], strokeWidth: 3.5, strokeLinecap: "round" }),
      Plot.dot(rows, { x: "median", y: "name", r: 4.5, fill: (r) => VERDICT[r.verdict], stroke: "var(--paper)", strokeWidth: 1 }),
      narrow ? null : Plot.text(rows, { frameAnchor: "right", y: "name", text: (r) => `${r.verdict}, ${interval(r)}`, textAnchor: "start", dx: 12, fill: "var(--ink)" }),
    ],
  });
}

if (data.rows) {
  const rows = data.rows.filter((row) => row.ratio).map((row) => ({ name: [row.name, row.precision, row.policy].filter(Boolean).join(", "), verdict: row.verdict, ...row.ratio }));
  if (rows.length) chart("chart-rows", (width) => forest(rows, width));
}

// ------------------------------------------------------------------------------------------------------------ accuracy
const WAY = { automatic: "var(--w1)", fused: "var(--w2)" };
const WAYS = (data.ways ?? []).map(([key, title]) => [key, title, WAY[key] ?? "var(--w0)"]);
if (data.tensors) {
  let metric = document.querySelector("#metrics [data-metric]")?.dataset.metric ?? "max_abs";
  const value = (part) => (part && part[metric] !== null && part[metric] !== undefined ? (metric === "cosine" ? Math.abs(1 - part.cosine) : part[metric]) : null);
  const points = () => data.tensors.flatMap((tensor, i) => {
    const ways = WAYS.filter(([key]) => tensor[key]).map(([key, title]) => ({ i, tensor, way: title, y: value(tensor[key]) }));
    return ways.length ? ways : [{ i, tensor, way: "compared", y: value(tensor) }];
  }).filter((point) => point.y !== null);
  // One node by itself, on the reference's inputs: no line, as none of these hangs on the one before.
  const ALONE = "alone";
  const apart = () => data.tensors.map((tensor, i) => ({ i, tensor, way: ALONE, y: value(tensor.alone) })).filter((point) => point.y !== null);
  const redraw = chart("chart-tensors", (width) => {
    const run = points(), alone = apart(), all = [...run, ...alone];
    const least = d3.min(all.filter((p) => p.y > 0), (p) => p.y) ?? 1e-9;
    const floor = least / 9; // where "no difference" stands
    const most = d3.max(all, (p) => p.y) || 1e-8;
    for (const p of all) p.shown = p.y > 0 ? p.y : floor;
    const marked = data.tensors.map((tensor, i) => ({ tensor, i })).filter(({ tensor }) => tensor.fusion);
    const bad = run.filter((p) => p.tensor.agrees === false && (p.way === "compared" || p.way === "fused" || !p.tensor.fused));
    const wrong = alone.filter((p) => p.tensor.alone.agrees === false);
    const colour = { domain: [...WAYS.map((w) => w[1]), "compared"], range: [...WAYS.map((w) => w[2]), "var(--w2)"] };
    return Plot.plot({
      ...base, width, height: 340, marginLeft: 62, marginRight: 14, marginBottom: 44, marginTop: 24,
      x: { label: "tensor, in topological order →", domain: [-0.5, data.tensors.length - 0.5], ticks: Math.min(10, data.tensors.length), tickFormat: (i) => (Number.isInteger(i) ? String(i + 1) : "") },
      y: { type: "log", domain: [floor / 2, Math.max(most * 1.6, least * 2)], label: `↑ ${{ max_abs: "max abs error", max_rel: "max relative error", relative_rms: "norm of the error / norm", ulp: "error in ULP", cosine: "1 − cosine" }[metric]}`, grid: true, ticks: 6, tickFormat: (y) => (y >= 0.01 && y < 1e4 ? String(Number(y.toPrecision(2))) : y.toExponential(0)) },
      color: colour,
      marks: [
        Plot.ruleX(marked, { x: "i", stroke: (m) => colourOf(m.tensor.fusion), strokeWidth: Math.max(2, Math.min(12, width / data.tensors.length - 1)), strokeOpacity: 0.14 }),
        all.some((p) => p.y === 0) ? Plot.ruleY([floor], { stroke: "var(--line)" }) : null,
        all.some((p) => p.y === 0) ? Plot.text([floor], { y: (y) => y, frameAnchor: "left", text: () => "none", textAnchor: "end", dx: -9, fill: "var(--quiet)" }) : null,
        Plot.line(run, { x: "i", y: (p) => (p.y > 0 ? p.y : NaN), z: "way", stroke: "way", strokeWidth: 1.5, strokeOpacity: 0.55 }),
        Plot.dot(run.filter((p) => p.y === 0), { x: "i", y: "shown", fill: "var(--paper)", stroke: "var(--bar)", r: 2 }),
        Plot.dot(alone, { x: "i", y: "shown", stroke: "var(--w2)", strokeWidth: 1.5, fill: "var(--paper)", symbol: "diamond", r: 3.6 }),
        Plot.dot(run.filter((p) => p.y > 0), { x: "i", y: "shown", fill: "way", r: data.tensors.length > 400 ? 2 : 3.2 }),
        Plot.ruleX(bad.slice(0, 1), { x: "i", stroke: "var(--bad)", strokeWidth: 1.5, strokeDasharray: "4 3" }),
        Plot.text(bad.slice(0, 1), { x: "i", frameAnchor: "top", text: () => "first that differs", fill: "var(--bad)", dy: -12, textAnchor: bad[0]?.i > data.tensors.length / 2 ? "end" : "start", fontWeight: 600 }),
        Plot.dot(bad, { x: "i", y: "shown", r: 7.5, stroke: "var(--paper)", strokeWidth: 5 }),
        Plot.dot(bad, { x: "i", y: "shown", r: 7.5, stroke: "var(--bad)", strokeWidth: 2.5 }),
        Plot.dot(wrong, { x: "i", y: "shown", symbol: "diamond", r: 5, fill: "var(--bad)", stroke: "var(--paper)" }),
        Plot.text(wrong.slice(0, 1), { x: "i", y: "shown", text: () => "wrong by itself", fill: "var(--bad)", dy: -12, textAnchor: wrong[0]?.i > data.tensors.length / 2 ? "end" : "start", fontWeight: 600 }),
        Plot.tip(all, Plot.pointer({ x: "i", y: "shown", title: (p) => tensorSaid(p) })),
      ],
    });
  });
  const tensorSaid = ({ tensor, way, y, i }) => [
    `${i + 1}. ${cut(visible(tensor.name), 70)}`,
    `${way === ALONE ? "alone, on the reference's inputs" : way}: ${y === 0 ? "no difference" : figure(y)}`,
    tensor.node ? `made by ${cut(visible(tensor.node), 60)}` : null,
    tensor.fusion ? `fusion ${tensor.fusion}` : null,
    way !== ALONE && tensor.agrees === false ? `differs${tensor.reason ? ": " + cut(visible(tensor.reason), 60) : ""}` : null,
    way === ALONE && tensor.alone.agrees === false ? `wrong by itself${tensor.alone.reason ? ": " + cut(visible(tensor.alone.reason), 60) : ""}` : null,
  ].filter(Boolean).join("\n");
  const used = WAYS.filter(([key]) => data.tensors.some((tensor) => tensor[key]));
  const tinted = [...new Set(data.tensors.map((t) => t.fusion).filter(Boolean))];
  $("legend-tensors")?.append(...used.map(([, title, colour]) => swatch(colour, title, "dot")), ...(apart().length ? [el("span", { class: "swatch" }, "◇ alone")] : []), ...tinted.map((fusion) => swatch(colourOf(fusion), fusion, "soft")));
  const buttons = document.querySelectorAll("#metrics [data-metric]");
  for (const button of buttons) button.addEventListener("click", () => { metric = button.dataset.metric; pressed(buttons, button); redraw(); });
}

if (data.budget) {
  const colours = data.budget.ways.map((way) => WAY[way] ?? "var(--w0)");
  const key = data.budget.figure[0];
  const points = data.budget.outputs.flatMap(([name, errors]) => errors.map((error, k) => ({ name, way: data.budget.ways[k], y: error?.[key] })).filter((p) => p.y !== null && p.y !== undefined));
  const least = d3.min(points.filter((p) => p.y > 0), (p) => p.y) ?? 1e-9;
  const ends = [least / 3, (d3.max(points, (p) => p.y) || least) * 2];
  for (const p of points) p.shown = p.y > 0 ? p.y : ends[0];
  const names = data.budget.outputs.map(([name]) => name);
  chart("chart-budget", (width) => {
    const left = Math.min(320, Math.max(90, d3.max(names, (n) => n.length) * 7.2 + 16), width * 0.4);
    return Plot.plot({
      ...base, width, height: 64 + Math.min(names.length, 40) * 30, marginLeft: left, marginRight: 30, marginTop: 20, marginBottom: 40,
      x: { type: "log", domain: ends, label: `${data.budget.figure[1]} →`, grid: true, ticks: 6, tickFormat: (x) => x.toExponential(0) },
      y: { domain: names.slice(0, 40), label: null, tickSize: 0, tickFormat: (n) => cut(visible(n), Math.floor(left / 7)) },
      color: { domain: data.budget.ways, range: colours, legend: true },
      marks: [
        Plot.ruleY(names.slice(0, 40), { y: (n) => n, stroke: "var(--line)" }),
        Plot.dot(points, { x: "shown", y: "name", fill: "way", r: 5.5, stroke: "var(--paper)" }),
        points.some((p) => p.y === 0) ? Plot.text([ends[0]], { x: (x) => x, frameAnchor: "top", text: () => "none", dy: -8, fill: "var(--quiet)" }) : null,
        Plot.tip(points, Plot.pointer({ x: "shown", y: "name", title: (p) => `${p.way}: ${figure(p.y)}` })),
      ],
    });
  });
}

// ------------------------------------------------------------------------------------------------------------ roofline
if (data.roofline) {
  const { points, copy_gbps: copy, matmul_tflops: peak } = data.roofline;
  const kernels = [...new Set(points.map((p) => p.kernel))];
  const shapes = { cold: "circle", warm: "diamond", "in the engine": "star" };
  const rows = points.map((p) => ({ ...p, x: p.flops / p.bytes, y: p.flops / p.us / 1e3 }));
  $("legend-roofline")?.append(
    ...kernels.map((kernel, i) => swatch(`var(--f${i % COLOURS})`, kernel, "dot")),
    ...[["cold", "● cold cache"], ["warm", "◆ warm cache"], ["in the engine", "★ in the engine"]].filter(([key]) => points.some((p) => p.cache === key)).map(([, words]) => el("span", { class: "swatch" }, words)),
  );
  chart("chart-roofline", (width) => {
    const [x0, x1] = [Math.min(0.1, d3.min(rows, (r) => r.x) / 1.6), Math.max(10, d3.max(rows, (r) => r.x) * 2)];
    const low = Math.min(d3.min(rows, (r) => r.y) / 2, copy * x0);
    const ridge = peak ? (peak * 1e3) / copy : Infinity;
    const end = Math.min(x1, ridge);
    const roof = [{ x: x0, y: copy * x0 }, { x: end, y: copy * end }, ...(x1 > ridge ? [{ x: x1, y: peak * 1e3 }] : [])];
    return Plot.plot({
      ...base, width, height: 420, marginLeft: 66, marginRight: 24, marginBottom: 44, marginTop: 24,
      x: { type: "log", label: "operations a byte →", domain: [x0, x1], grid: true, ticks: 4, tickFormat: (x) => String(Number(x.toPrecision(2))) },
      y: { type: "log", label: "↑ GFLOP/s", grid: true, ticks: 5, domain: [low, copy * x1 * 1.3], tickFormat: (y) => (y >= 1000 ? `${y / 1000}k` : String(Number(y.toPrecision(2)))) },
      symbol: { domain: Object.keys(shapes), range: Object.values(shapes) },
      marks: [
        Plot.line(roof, { x: "x", y: "y", stroke: "var(--ink)", strokeWidth: 2 }),
        Plot.line(roof.map((p) => ({ x: p.x, y: p.y / 2 })), { x: "x", y: "y", stroke: "var(--quiet)", strokeDasharray: "3 4" }),
        Plot.text([roof[1]], { x: "x", y: "y", text: () => `a copy: ${Math.round(copy)} GB/s`, textAnchor: "end", dx: -22, dy: -4, fill: "var(--ink)" }),
        Plot.text([roof[1]], { x: "x", y: (p) => p.y / 2, text: () => "half of that", textAnchor: "end", dx: 0, dy: 22, fill: "var(--quiet)" }),
        Plot.dot(rows, { x: "x", y: "y", symbol: (r) => r.cache ?? "cold", fill: (r) => `var(--f${kernels.indexOf(r.kernel) % COLOURS})`, fillOpacity: 0.75, stroke: "var(--paper)", strokeWidth: 0.7, r: 5 }),
        Plot.tip(rows, Plot.pointer({ x: "x", y: "y", title: (r) => [`${r.kernel}, ${r.dtype}${r.cache ? `, ${r.cache}` : ""}`, visible(r.label ?? ""), `${figure(r.us)} µs, ${Math.round(r.gbps ?? r.bytes / r.us / 1e3)} GB/s`, r.share_of_copy !== undefined ? `${Math.round(100 * r.share_of_copy)} % of a copy` : null].filter(Boolean).join("\n") })),
      ],
    });
  });
}
