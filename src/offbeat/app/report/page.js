"use strict";
// The page has a part for each group of runs that can be compared. All functions draw the current part.
let part, data, methods;
const color = method => `var(--c${methods.indexOf(method) % 8})`;
const dash = method => ["", "6 4", "2 3", "8 3 2 3"][Math.floor(methods.indexOf(method) / 8) % 4];
const byId = id => part.root.querySelector(`[data-id="${id}"]`);
const floating = document.getElementById("tip");

function enter(other) {
  part = other;
  ({ data, methods } = part);
}

function fill(node, attributes = {}, ...children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const html = (tag, ...rest) => fill(document.createElement(tag), ...rest);
const svg = (tag, ...rest) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), ...rest);

function number(value, digits = 3) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9) return trim((value / 1e9).toPrecision(digits)) + "G";
  if (size >= 1e6) return trim((value / 1e6).toPrecision(digits)) + "M";
  if (size >= 1e4) return trim((value / 1e3).toPrecision(digits)) + "k";
  if (size < 1e-3) return value.toExponential(Math.max(0, digits - 2));
  return trim(value.toPrecision(digits));
}
const trim = text => text.includes("e") ? String(Number(text)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;

function scale(values, low, high, { log = false, zero = false } = {}) {
  const found = values.filter(v => v !== null && Number.isFinite(v) && (!log || v > 0));
  let from = Math.min(...found), to = Math.max(...found);
  if (!found.length) [from, to] = [0, 1];
  if (zero) from = Math.min(0, from);
  if (log) {
    if (from === to) { from /= 2; to *= 2; }
    const [a, b] = [Math.log(from), Math.log(to)], pad = (b - a) * 0.05;
    const place = v => low + (Math.log(v) - a + pad) / (b - a + 2 * pad) * (high - low);
    return { place, ticks: logTicks(from, to) };
  }
  if (from === to) { to = from + (Math.abs(from) || 1); }
  const step = nice((to - from) / 4);
  const pad = zero ? 0 : (to - from) * 0.04;
  const ticks = [];
  for (let t = Math.ceil((from - pad) / step) * step; t <= to + pad + step * 1e-6; t += step) ticks.push(Math.abs(t) < step * 1e-6 ? 0 : t);
  const place = v => low + (v - from + pad) / (to - from + 2 * pad) * (high - low);
  return { place, ticks };
}

function nice(step) {
  const power = 10 ** Math.floor(Math.log10(step));
  return power * [1, 2, 2.5, 5, 10].find(m => m * power >= step * 0.999);
}

function logTicks(from, to) {
  for (const parts of [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]) {
    const ticks = [];
    for (let e = Math.floor(Math.log10(from)); e <= Math.ceil(Math.log10(to)); e++)
      for (const m of parts) if (m * 10 ** e >= from * 0.98 && m * 10 ** e <= to * 1.02) ticks.push(m * 10 ** e);
    if (ticks.length >= 3) return ticks;
  }
  return [from, to];
}

function labelTicks(ticks) {
  // Use as many digits as it takes to make the labels differ.
  for (let digits = 3; digits < 9; digits++) {
    const found = ticks.map(t => number(t, digits));
    if (new Set(found).size === found.length) return found;
  }
  return ticks.map(t => number(t));
}

function frame(holder, height, x, y, labels, margin) {
  const width = holder.clientWidth, box = { ...{ left: 46, right: 14, top: 10, bottom: 38 }, ...margin };
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${labels.y} against ${labels.x}` });
  const sx = scale(x.values, box.left, width - box.right, x), sy = scale(y.values, height - box.bottom, box.top, y);
  const [words, below] = [labelTicks(sy.ticks), labelTicks(sx.ticks)];
  for (const [i, t] of sy.ticks.entries()) {
    drawing.append(svg("line", { class: "grid", x1: box.left, x2: width - box.right, y1: sy.place(t), y2: sy.place(t) }));
    drawing.append(svg("text", { x: box.left - 7, y: sy.place(t) + 4, "text-anchor": "end" }, words[i]));
  }
  let last = -Infinity;
  for (const [i, t] of sx.ticks.entries()) {
    if (sx.place(t) - last < 38 || sx.place(t) > width - 8) continue;
    last = sx.place(t);
    drawing.append(svg("text", { x: last, y: height - box.bottom + 18, "text-anchor": "middle" }, below[i]));
  }
  drawing.append(svg("line", { class: "axis", x1: box.left, x2: width - box.right, y1: height - box.bottom, y2: height - box.bottom }));
  drawing.append(svg("text", { x: width - box.right, y: height - 3, "text-anchor": "end" }, labels.x));
  holder.replaceChildren(drawing);
  return { drawing, x: sx.place, y: sy.place, width, height, box };
}

function tip(node, words) {
  const show = event => {
    const box = floating;
    box.textContent = words;
    box.style.opacity = 1;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = Math.min(innerWidth - width - 8, Math.max(8, event.clientX + 12)) + "px";
    box.style.top = Math.max(8, event.clientY - height - 10) + "px";
  };
  node.addEventListener("pointermove", show);
  node.addEventListener("pointerdown", show);
  node.addEventListener("pointerleave", () => { floating.style.opacity = 0; });
}

function path(points) {
  return points.map((p, i) => `${i ? "L" : "M"}${p[0].toFixed(1)},${p[1].toFixed(1)}`).join("");
}

function choose(holder, names, chosen, then) {
  const own = part;
  holder.replaceChildren(...names.map(([key, label]) => {
    const button = html("button", { type: "button", "aria-pressed": key === chosen }, label);
    button.addEventListener("click", () => {
      for (const other of holder.children) other.setAttribute("aria-pressed", other === button);
      enter(own);
      then(key);
    });
    return button;
  }));
}

const visible = method => !part.hidden.has(method);

function legend(holder) {
  // A click hides the lines of a method, or shows them again.
  const own = part;
  holder.replaceChildren(...methods.map(method => {
    const label = data.rows.some(row => row.method === method) ? method : `${method} (unfinished)`;
    const button = html("button", { type: "button", "aria-pressed": true, title: "Hide or show this method" }, html("i", { class: "swatch", style: `background:${color(method)}` }), label);
    button.addEventListener("click", () => {
      enter(own);
      const shown = !part.hidden.delete(method);
      if (shown) part.hidden.add(method);
      button.setAttribute("aria-pressed", !shown);
      drawLines();
    });
    return button;
  }));
}

// The axes fit the methods that are shown, or all of them if none is.
const fit = items => items.some(item => visible(item.method)) ? items.filter(item => visible(item.method)) : items;

function keys(holder, pairs) {
  holder.replaceChildren(...pairs.map(([paint, label]) => html("span", {}, html("i", { class: "swatch", style: `background:${paint}` }), label)));
}

function sortRows() {
  const { key, sign } = part.sort;
  const missing = row => row[key] === null || row[key] === undefined;
  const compare = (a, b) => missing(a) || missing(b) ? missing(a) - missing(b) : sign * (a[key] > b[key] ? 1 : a[key] < b[key] ? -1 : 0);
  return key ? [...data.rows].sort(compare) : data.rows;
}

function drawTable() {
  const some = name => data.rows.some(row => row[name] !== null);
  const searched = new Set(data.rows.flatMap(row => row.rates.map(rate => rate[0]))).size > 1;
  const given = data.to_loss !== null, goal = given ? `loss ${number(data.to_loss, 6)}` : "ref. loss";
  const alone = data.rows.length < 2;  // nothing to compare with
  const maybe = (value, digits, missing = "") => value === null ? missing : value.toFixed(digits);
  const columns = [
    ...(searched ? [["lr", "lr", row => String(row.lr)]] : []),
    ["loss", "loss", row => row.loss === null ? "diverged" : row.loss.toFixed(4) + (row.spread === null ? "" : ` ± ${row.spread.toFixed(4)}`), "low"],
    ...(some("accuracy") ? [["accuracy", "accuracy", row => row.accuracy === null ? "" : (100 * row.accuracy).toFixed(1) + " %", "high"]] : []),
    ["seconds", "seconds", row => row.seconds.toFixed(2), "low"],
    ["exposed", "exposed s", row => row.exposed.toFixed(2), "low"],
    ["hidden", "hidden s", row => row.hidden.toFixed(2)],
    ["megabytes", "MB/worker", row => row.megabytes.toFixed(2), "low"],
    ...(some("kernel_megabytes") ? [["kernel_megabytes", "MB on the wire", row => maybe(row.kernel_megabytes, 2)]] : []),
    ["rounds", "rounds", row => number(row.rounds, 4)],
    ...(alone && !given ? [] : [["reached", `s to ${goal}`, row => maybe(row.reached, 2, "never"), "low"]]),
    ...(given ? [["reached_megabytes", `MB to ${goal}`, row => maybe(row.reached_megabytes, 2, "never"), "low"]] : []),
    ...(alone ? [] : [["speedup", "speed-up", row => row.speedup === null ? "" : row.speedup.toFixed(2) + "×", "high"]]),
  ];
  const head = html("tr", {}, ...[["method", "method"], ...columns].map(([key, label, , better]) => {
    const sorted = part.sort.key === key, button = html("button", { type: "button", title: `Sort by ${label}` }, label);
    const own = part, first = better === "high" ? -1 : 1;
    button.addEventListener("click", () => {
      enter(own);
      // The best comes first; the second click turns the order round, and the third restores it.
      part.sort = !sorted ? { key, sign: first } : part.sort.sign === first ? { key, sign: -first } : {};
      drawTable();
      byId("table").querySelectorAll("th button")[[...head.children].indexOf(button.parentNode)].focus();
    });
    return html("th", { "aria-sort": !sorted ? "none" : part.sort.sign > 0 ? "ascending" : "descending" }, button);
  }));
  const rows = sortRows().map(row => html("tr", {},
    html("td", {}, html("i", { class: "swatch", style: `background:${color(row.method)}` }), html("code", {}, row.method)),
    ...columns.map(([key, , show, better]) => {
      const values = data.rows.map(r => r[key]).filter(v => v !== null);
      const best = better && new Set(values).size > 1 && row[key] === (better === "low" ? Math.min(...values) : Math.max(...values));
      return html("td", best ? { class: "best" } : {}, show(row));
    })));
  const left = methods.filter(method => !data.rows.some(row => row.method === method)).map(method => html("tr", {},
    html("td", {}, html("i", { class: "swatch", style: `background:${color(method)}` }), html("code", {}, method)), html("td", { colspan: columns.length, class: "left" }, "unfinished")));
  byId("table").replaceChildren(html("thead", {}, head), html("tbody", {}, ...rows, ...left));
  byId("tablenote").textContent = `Means over ranks${data.rows.some(r => r.seeds > 1) ? " and seeds, ± the standard deviation over seeds" : ""}${alone ? "" : `; the reference is ${data.reference}`}. ` +
    "Exposed: a worker stood still for messages. Hidden: messages were in flight while it worked. " +
    (given ? `To ${goal}: until the loss was first that low, and the bytes that rank 0 had sent by then.` : alone ? "" : "To ref. loss: until the loss is within 5 % of the reference's final loss with the same seed.") +
    (searched ? " Every method is shown at the learning rate with its lowest final loss." : "") +
    (data.unfinished.length ? ` Unfinished, and not in the table: ${data.unfinished.join("; ")}.` : "");
  byId("verdict").textContent = data.verdict;
  byId("verdict").hidden = !data.verdict;
}

const axes = () => [["seconds", e => e[0]], [`${data.setting.unit} seen`, e => e[1]], ["MB sent by a worker", e => e[2] / 1e6]];

function target() {
  // The loss to reach: the given one, or that of the reference within 5 %.
  if (data.to_loss !== null) return data.to_loss;
  const base = data.rows.find(row => row.method === data.reference);
  return base && base.loss !== null && data.rows.length > 1 ? base.loss + 0.05 * Math.abs(base.loss) : null;
}

const shorten = (text, width) => text.length * 6.6 > width ? text.slice(0, Math.max(1, Math.floor(width / 6.8))) + "…" : text;

function drawLoss() {
  const [label, get] = axes()[part.axis];
  const all = fit(data.runs.filter(run => run.evals.some(e => e[3] !== null))).flatMap(run => run.evals).filter(e => e[3] !== null);
  if (!all.length) return;
  const goal = target(), losses = [...all.map(e => e[3]), ...(goal === null ? [] : [goal])], log = Math.min(...losses) > 0 && Math.max(...losses) / Math.min(...losses) > 6;
  const f = frame(byId("loss"), byId("loss").clientWidth < 520 ? 300 : 380, { values: all.map(get), zero: true }, { values: losses, log }, { x: label, y: "held-out loss" }, {});
  if (goal !== null) {
    const y = f.y(goal), words = data.to_loss === null ? `5 % above the last loss of ${data.reference}` : `loss ${number(goal, 6)}`;
    f.drawing.append(svg("line", { class: "goal", x1: f.box.left, x2: f.width - f.box.right, y1: y, y2: y }));
    f.drawing.append(svg("text", { x: f.box.left + 4, y: y - 5 }, shorten(words, f.width - f.box.left)));
  }
  const faint = data.rows.some(row => row.seeds > 1) ? 0.6 : 1;
  for (const run of data.runs.filter(run => visible(run.method))) {
    const points = run.evals.filter(e => e[3] !== null).map(e => [f.x(get(e)), f.y(e[3])]);
    if (!points.length) continue;
    f.drawing.append(svg("path", { d: path(points), fill: "none", stroke: color(run.method), "stroke-width": 2, "stroke-opacity": faint, "stroke-dasharray": dash(run.method), "stroke-linejoin": "round" }));
    run.evals.filter(e => e[3] !== null).forEach((e, i) => {
      f.drawing.append(svg("circle", { cx: points[i][0], cy: points[i][1], r: 2.6, fill: color(run.method), "fill-opacity": faint }));
      const spot = svg("circle", { cx: points[i][0], cy: points[i][1], r: 11, fill: "transparent" });
      tip(spot, `${run.method}, seed ${run.seed}${run.complete ? "" : " (unfinished)"}\nstep ${e[4]}: loss ${e[3].toFixed(4)}\n${number(e[0])} s, ${number(e[1])} ${data.setting.unit}, ${number(e[2] / 1e6)} MB`);
      f.drawing.append(spot);
    });
  }
}

function drawPareto() {
  const all = data.rows.filter(row => row.loss !== null), rows = fit(all);
  if (!rows.length) return;
  const sent = row => Math.max(row.megabytes, 1e-6);
  const values = rows.map(sent), log = Math.max(...values) / Math.min(...values) > 6;
  const f = frame(byId("pareto"), 300, { values, log }, { values: rows.flatMap(r => [r.loss - (r.spread ?? 0), r.loss + (r.spread ?? 0)]) }, { x: "MB sent by a worker" + (log ? ", logarithmic" : ""), y: "held-out loss" }, { top: 16, right: 18 });
  const front = rows.filter(r => !rows.some(o => o.loss <= r.loss && sent(o) <= sent(r) && (o.loss < r.loss || sent(o) < sent(r)))).sort((a, b) => sent(a) - sent(b));
  f.drawing.append(svg("path", { d: path(front.map(r => [f.x(sent(r)), f.y(r.loss)])), fill: "none", stroke: "var(--quiet)", "stroke-width": 1, "stroke-dasharray": "3 3" }));
  const taken = [];
  const name = row => row.method.replace(/\(.*/, ""), unique = row => all.filter(other => name(other) === name(row)).length === 1;
  for (const row of rows.filter(row => visible(row.method))) {
    const [x, y] = [f.x(sent(row)), f.y(row.loss)];
    if (row.spread !== null) f.drawing.append(svg("line", { x1: x, x2: x, y1: f.y(row.loss - row.spread), y2: f.y(row.loss + row.spread), stroke: color(row.method), "stroke-width": 1.5, "stroke-opacity": 0.6 }));
    const dot = svg("circle", { cx: x, cy: y, r: 6, fill: color(row.method), stroke: "var(--card)", "stroke-width": 2 });
    tip(dot, `${row.method}\nloss ${row.loss.toFixed(4)}, ${number(row.megabytes)} MB`);
    f.drawing.append(dot);
    const label = unique(row) ? name(row) : shorten(row.method, 0.6 * f.width), size = label.length * 6.6, right = x + 10 + size < f.width;
    const box = { x: right ? x + 10 : x - 10 - size, y: y - 7, w: size, h: 14 };
    while (taken.some(t => box.x < t.x + t.w && t.x < box.x + box.w && box.y < t.y + t.h && t.y < box.y + box.h)) box.y -= 13;
    if (box.y > 0) {
      taken.push(box);
      f.drawing.append(svg("text", { class: "strong", x: box.x, y: box.y + 11 }, label));
    }
    taken.push({ x: x - 7, y: y - 7, w: 14, h: 14 });
  }
}

function drawRates() {
  const tried = data.rows.map(row => [row, row.rates.filter(rate => rate[1] !== null)]), all = tried.flatMap(([, rates]) => rates);
  if (byId("search").hidden || !all.length) return;
  const losses = all.map(rate => rate[1]), log = Math.min(...losses) > 0 && Math.max(...losses) / Math.min(...losses) > 6;
  const f = frame(byId("rates"), 260, { values: all.map(rate => rate[0]), log: true }, { values: losses, log }, { x: "learning rate, logarithmic", y: "final loss" }, {});
  for (const [row, rates] of tried.filter(([row]) => visible(row.method))) {
    const points = rates.map(([lr, loss]) => [f.x(lr), f.y(loss)]);
    f.drawing.append(svg("path", { d: path(points), fill: "none", stroke: color(row.method), "stroke-width": 2, "stroke-dasharray": dash(row.method) }));
    rates.forEach(([lr, loss], i) => {
      const dot = svg("circle", { cx: points[i][0], cy: points[i][1], r: lr === row.lr ? 5.5 : 3, fill: color(row.method) });
      tip(dot, `${row.method}\nlr ${lr}: loss ${loss.toFixed(4)}`);
      f.drawing.append(dot);
    });
  }
}

function drawShares() {
  if (!data.rows.length) return;
  keys(byId("sharekeys"), [["var(--work)", "working"], ["var(--wait)", "exposed: standing still for messages"]]);
  const holder = byId("shares"), width = holder.clientWidth, line = 40, height = data.rows.length * line + 4;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "seconds working and waiting, by method" });
  const most = Math.max(...data.rows.map(row => row.seconds)), room = width - 58;
  data.rows.forEach((row, i) => {
    const work = Math.max(0, row.seconds - row.exposed) / most * room, wait = Math.min(row.exposed, row.seconds) / most * room;
    drawing.append(svg("text", { class: "strong", x: 0, y: i * line + 12 }, shorten(row.method, width)));
    const bars = [svg("rect", { x: 0, y: i * line + 18, width: Math.max(0, work), height: 13, fill: "var(--work)", rx: 2 }), svg("rect", { x: work + (work && wait ? 1.5 : 0), y: i * line + 18, width: Math.max(0, wait - 1.5), height: 13, fill: "var(--wait)", rx: 2 })];
    bars.forEach(bar => tip(bar, `${row.method}\n${(row.seconds - row.exposed).toFixed(2)} s working\n${row.exposed.toFixed(2)} s exposed\n${row.hidden.toFixed(2)} s of messages hidden`));
    drawing.append(...bars, svg("text", { x: work + wait + 7, y: i * line + 29 }, `${number(row.seconds)} s`));
  });
  holder.replaceChildren(drawing);
}

function drawTimeline() {
  const run = data.runs[part.shown], holder = byId("timeline");
  if (!run || !run.ranks.length) return;
  keys(byId("timekeys"), [["var(--work)", "working"], ["var(--wait)", "exposed"], ["var(--air)", "messages in flight"]]);
  const width = holder.clientWidth, left = 46, line = 34, height = run.ranks.length * line + 30;
  const from = Math.min(...run.ranks.map(r => r.steps[0][0] - r.steps[0][1])), to = Math.max(...run.ranks.map(r => r.steps.at(-1)[0]));
  const place = t => left + (Math.min(to, Math.max(from, t)) - from) / (to - from || 1) * (width - left - 8);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "time of each rank" });
  run.ranks.forEach((rank, i) => {
    const y = i * line + 4;
    drawing.append(svg("text", { x: 0, y: y + 14 }, `rank ${i}`));
    for (const [end, seconds, exposed] of rank.steps) {
      const still = Math.min(exposed, seconds), middle = end - still;
      const work = svg("rect", { x: place(end - seconds), y, width: Math.max(0.3, place(middle) - place(end - seconds) - 0.6), height: 18, fill: "var(--work)" });
      tip(work, `rank ${i}: ${number(1000 * (seconds - still))} ms working, ${number(1000 * still)} ms exposed`);
      drawing.append(work);
      if (still > 0) {
        const wait = svg("rect", { x: place(middle), y, width: Math.max(0.3, place(end) - place(middle)), height: 18, fill: "var(--wait)" });
        tip(wait, `rank ${i}: ${number(1000 * still)} ms exposed`);
        drawing.append(wait);
      }
    }
    for (const [a, b] of rank.flights) drawing.append(svg("rect", { x: place(a), y: y + 20.5, width: Math.max(1, place(b) - place(a)), height: 4, rx: 2, fill: "var(--air)", "fill-opacity": 0.85 }));
  });
  const time = scale([0, to - from], left, width - 8, { zero: true });
  for (const t of time.ticks) if (time.place(t) < width - 4) drawing.append(svg("text", { x: time.place(t), y: height - 6, "text-anchor": t ? "middle" : "start" }, `${number(t)} s`));
  holder.replaceChildren(drawing);
  const waits = run.ranks.map((r, i) => `rank ${i} ${(100 * r.exposed / (r.seconds || 1)).toFixed(0)} %`).join(", ");
  byId("timenote").textContent = `${run.method}, seed ${run.seed}: ${run.ranks[0].steps.length} log lines from the middle of the run, from ${number(from)} s on. A gap: the rank had finished its step and waited for the others at an evaluation or a checkpoint, or worked between two steps. Exposed share of the whole run: ${waits}.`;
}

function drawPresence() {
  const run = data.runs.find(run => run.presence.length);
  byId("presence").hidden = !run;
  if (!run) return;
  const share = value => `${Math.round(100 * value)} %`;
  const strip = rounds => svg("svg", { viewBox: `0 0 ${Math.max(1, rounds.length)} 1`, width: 320, height: 12, preserveAspectRatio: "none", role: "img", "aria-label": `${rounds.filter(Boolean).length} of ${rounds.length} rounds` },
    ...rounds.flatMap((there, i) => there ? [svg("rect", { x: i, y: 0, width: 1, height: 1, fill: "var(--work)" })] : []));
  const row = (kind, ...cells) => html("tr", {}, ...cells.map(cell => html(kind, {}, cell)));
  byId("present").replaceChildren(html("thead", {}, row("th", "worker", "alive", "counted", "rounds")),
    html("tbody", {}, ...run.presence.map(p => row("td", p.name, share(p.alive), share(p.counted), strip(p.rounds)))));
}

function drawSeries(id, column, label, options) {
  const runs = data.runs.filter(run => run.rounds.some(r => r[column] !== null && (!options.log || r[column] > 0)));
  if (!runs.length) { byId(id).replaceChildren(html("p", { class: "note" }, "No method here reports it: gradients and codes have none.")); return; }
  const points = run => run.rounds.filter(r => r[column] !== null && (!options.log || r[column] > 0));
  const all = fit(runs).flatMap(points);
  const f = frame(byId(id), 220, { values: all.map(r => r[0]), zero: true }, { values: all.map(r => r[column]), ...options }, { x: "seconds", y: label }, {});
  for (const run of runs.filter(run => visible(run.method))) {
    const drawn = points(run).map(r => [f.x(r[0]), f.y(r[column])]);
    const line = svg("path", { d: path(drawn), fill: "none", stroke: color(run.method), "stroke-width": 1.75, "stroke-dasharray": dash(run.method), "stroke-linejoin": "round" });
    tip(line, `${run.method}, seed ${run.seed}`);
    f.drawing.append(line);
    if (drawn.length === 1) f.drawing.append(svg("circle", { cx: drawn[0][0], cy: drawn[0][1], r: 3, fill: color(run.method) }));
  }
}

function drawCurves() {
  const paint = i => `var(--c${i % 8})`, sent = p => Math.max(p[0], 1e-6), points = data.curves.flatMap(c => c.points).filter(p => p[1] !== null);
  const accurate = points.every(p => p[2] !== null), value = p => accurate ? p[2] : p[1];
  byId("tradeoffhead").textContent = accurate ? "Accuracy against communication" : "Loss against communication";
  keys(byId("curvekeys"), data.curves.map((c, i) => [paint(i), c.name]));
  const f = frame(byId("curves"), byId("curves").clientWidth < 520 ? 320 : 420, { values: points.map(sent), log: true }, { values: points.map(value) }, { x: "MB sent by a worker, logarithmic", y: accurate ? "accuracy" : "loss" }, {});
  data.curves.forEach((curve, i) => {
    const drawn = curve.points.filter(p => p[1] !== null);
    f.drawing.append(svg("path", { d: path(drawn.map(p => [f.x(sent(p)), f.y(value(p))])), fill: "none", stroke: paint(i), "stroke-width": 2, "stroke-dasharray": ["", "6 4", "2 3"][Math.floor(i / 8) % 3] }));
    for (const p of drawn) {
      f.drawing.append(svg("circle", { cx: f.x(sent(p)), cy: f.y(value(p)), r: 3.4, fill: paint(i) }));
      const spot = svg("circle", { cx: f.x(sent(p)), cy: f.y(value(p)), r: 11, fill: "transparent" });
      tip(spot, `${curve.name}${p[3] === null ? "" : `, period ${p[3]}`}\nloss ${p[1].toFixed(4)}${p[2] === null ? "" : `, accuracy ${(100 * p[2]).toFixed(1)} %`}\n${number(p[0])} MB`);
      f.drawing.append(spot);
    }
  });
}

function drawOrigin() {
  const s = data.setting, count = new Set(data.runs.map(run => run.seed)).size;
  const link = s.link ? `, ${s.link}` : "", steps = s.steps.toLocaleString("en");
  if (data.curves.length) s.workers = [...new Set(data.runs.map(run => run.workers))].join(", ");
  byId("title").textContent = data.curves.length ? `A study of ${data.curves.length} curves on ${s.task}` : `${methods.length} method${methods.length === 1 ? "" : "s"} on ${s.task}${link}`;
  const place = { processes: s.link ? "processes on one machine, an emulated link" : "processes on one machine", netns: "network namespaces with shaped links", simulation: "a simulation in virtual time" }[s.where];
  byId("subtitle").textContent = `${s.workers} worker${s.workers === 1 ? "" : "s"}, ${data.curves.length ? "" : steps + " "}steps of ${s.batch} ${s.unit === "bytes" ? "windows" : s.unit} each, ${number(s.parameters, 4)} parameters, ${count} seed${count === 1 ? "" : "s"}; ${place}.`;
  byId("commands").replaceChildren(...data.commands.map(command => html("pre", { class: "mono" }, command)));
  const facts = { started: s.started, offbeat: s.offbeat, torch: s.torch, python: s.python, system: `${s.system}, ${s.cores} cores`, data: s.data ?? "built in", model: `${s.model ?? "the task's default"}, ${number(s.parameters, 4)} parameters`, batch: `${s.batch} ${s.unit === "bytes" ? "windows" : s.unit} per worker and step, ${data.curves.length ? "" : `${s.batch * s.workers} in all, `}${data.curves.length ? "several lengths" : `${steps} steps`}`, "learning rate": [...new Set(data.rows.flatMap(row => row.rates.map(rate => rate[0])))].join(", ") + " at its peak: a linear warm-up, then a cosine down to a tenth", optimizer: s.optimizer ?? "the task's", link: s.link ?? "none", straggler: s.straggler.join("; ") || "none" };
  byId("versions").replaceChildren(html("tbody", {}, ...Object.entries(facts).map(([key, value]) => html("tr", {}, html("td", {}, key), html("td", {}, String(value))))));
}

function draw() {
  if (data.curves.length) return drawCurves();
  drawLines(); drawShares(); drawTimeline();
}

function drawLines() {
  drawLoss(); drawPareto(); drawRates();
  drawSeries("period", 1, "period", { zero: true });
  drawSeries("drift", 2, "drift", { log: true });
}

function hintScroll() {
  const holder = byId("scroll");
  byId("swipe").hidden = holder.scrollWidth <= holder.clientWidth + 1;
}

function build(data) {
  const root = document.getElementById("part").content.cloneNode(true).firstElementChild;
  document.getElementById("page").append(root);
  const methods = [...new Set(data.runs.map(run => run.method))];
  const shown = Math.max(0, data.runs.findIndex(run => run.method !== data.reference && run.ranks.length));
  enter({ root, data, methods, shown, axis: 0, hidden: new Set(), sort: {} });
  drawOrigin();
  byId("tradeoff").hidden = !data.curves.length;
  byId("single").hidden = data.curves.length > 0;
  byId("search").hidden = !data.rows.some(row => row.rates.length > 1);
  drawTable();
  drawPresence();
  legend(byId("legend"));
  choose(byId("axis"), [[0, "time"], [1, `${data.setting.unit} seen`], [2, "bytes sent"]], 0, key => { part.axis = key; drawLoss(); });
  choose(byId("which"), data.runs.map((run, i) => [i, run]).filter(([, run]) => run.ranks.length && run.seed === data.runs[0].seed).map(([i, run]) => [i, run.method]), shown, key => { part.shown = key; drawTimeline(); });
  return part;
}

const parts = JSON.parse(document.getElementById("data").textContent).map(build);
const drawAll = () => { for (const each of parts) { enter(each); draw(); hintScroll(); } };
drawAll();
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
