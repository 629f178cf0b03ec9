// Everything that records say goes into the page as text, never as markup.
const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const EVERY_MS = 3000;
let at = 0, state = null, timer = null, drawn = "";
// Answers may come in another order than their requests: only the last request's is shown.
let refreshes = 0, searches = 0;

const make = (name, text, className) => {
  const node = document.createElement(name);
  if (text !== undefined && text !== null) node.textContent = String(text);
  if (className) node.className = className;
  return node;
};
const shape = (name, attributes, title) => {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  if (title) { const t = document.createElementNS(SVG, "title"); t.textContent = title; node.append(t); }
  return node;
};
const number = (n) => Math.round(n).toLocaleString("en-US");
const span = (ms) => {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60e3) return `${(ms / 1000).toFixed(1)} s`;
  for (const [size, name, less, lower] of [[864e5, "d", 36e5, "h"], [36e5, "h", 6e4, "min"], [6e4, "min", 1e3, "s"]])
    if (ms >= size) return `${Math.floor(ms / size)} ${name} ${Math.floor((ms % size) / less)} ${lower}`.replace(/ 0 \w+$/, "");
};
const moment = (ms) => {
  const at = new Date(ms - new Date(ms).getTimezoneOffset() * 60e3).toISOString();
  return `${at.slice(0, 10)} ${at.slice(11, 19)}`;
};

const table = (id, head, rows) => {
  const body = make("tbody"), top = make("tr");
  for (const [name, kind] of head) top.append(as("columnheader", make("th", name, kind)));
  for (const row of rows) {
    const line = as("row", make("tr"));
    row.cells.forEach((value, n) => {
      const cell = as("cell", value instanceof Node ? value : make("td", value, head[n][1]));
      cell.dataset.label = head[n][0];
      line.append(cell);
    });
    if (row.act) {
      line.className = "link";
      line.addEventListener("click", row.act);
      // The whole row reacts to the mouse; a keyboard and a screen reader need a button.
      const button = make("button", line.firstChild.textContent, "plain");
      button.title = "show these letters";
      line.firstChild.replaceChildren(button);
    }
    body.append(line);
  }
  const header = as("rowgroup", make("thead"));
  header.append(as("row", top));
  byId(id).replaceChildren(header, as("rowgroup", body));
};
// On a narrow screen the style shows rows as cards; roles keep them a table for screen readers.
const as = (role, node) => { node.setAttribute("role", role); return node; };

const ask = async (path, options) => {
  const answer = await fetch(path, options);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
};
const trouble = (error) => {
  byId("problem").hidden = !error;
  byId("problem").textContent = error ? error.message : "";
};

const damage = (files) => (files.length ? { message: files.join(" ") } : null);

// -- figures -------------------------------------------------------------------------------------

const showHead = (s) => {
  const holder = s.holder;
  const [text, kind] = !holder ? ["never started", ""]
    : holder.holds === null ? [`last owner ${holder.name}; this host cannot check whether it runs`, ""]
    : holder.holds ? [`running, owner ${holder.name}`, "good"] : [`not running, last owner ${holder.name}`, "bad"];
  byId("runs").textContent = s.epoch ? `${text}, epoch ${s.epoch}` : text;
  byId("runs").className = `state ${kind}`;
  const way = s.under_way;
  const now = way ? `micro-batch ${way.number} ${!holder || holder.holds === false ? "was not finished" : way.decided ? "is being written" : "runs"}, planned ${span(Math.max(0, s.at_ms - way.planned_ms))} before; ` : "";
  byId("read").textContent = `${now}as of ${moment(s.at_ms)}`;
};

const showTiles = (s) => {
  const sum = (name) => Object.values(s.counts.spouts).reduce((all, one) => all + one[name], 0);
  const last = s.batches.at(-1);
  const lag = Object.values(s.lag).reduce((all, one) => all + one, 0);
  const tiles = [
    ["records", number(sum("records"))], ["acked", number(sum("acked"))],
    ["waiting", number(s.waiting.records)], ["dead", number(sum("dead"))],
    ["dead letters not replayed", number(s.dead.letters - s.dead.sent)],
    ["records/s", last ? number(last.records_per_s) : "–"],
    ["latency, median", last && last.acked ? span(1000 * last.latency_s.p50) : "–"],
    ["latency, 99th percentile", last && last.acked ? span(1000 * last.latency_s.p99) : "–"],
    ["oldest waiting", s.waiting.oldest_ms === null ? "–" : span(Math.max(0, s.at_ms - s.waiting.oldest_ms))],
  ];
  if (Object.keys(s.lag).length) tiles.push(["lag, offsets", number(lag)]);
  for (const [name, size] of Object.entries(s.tables)) tiles.push([`rows of table ${name}`, number(size.rows)]);
  for (const [bolt, cost] of Object.entries(s.counts.spent)) tiles.push([`spent by ${bolt}`, String(+cost.toPrecision(6))]);
  if (s.dead.dropped) tiles.push(["dead letters dropped", number(s.dead.dropped)]);
  if (s.skips.length) tiles.push(["times that planned rows were left out", number(s.skips.length)]);
  if (s.requests) tiles.push(["requested replays", number(s.requests)]);
  if (!s.counts.balanced) tiles.push(["counts", "do not balance"]);
  byId("tiles").replaceChildren(...tiles.map(([name, value]) => {
    const tile = make("div", null, "tile");
    tile.append(make("b", value, value === "do not balance" ? "bad" : ""), make("span", name));
    return tile;
  }));
};

const showCounts = (s) => {
  const names = ["records", "replayed", "acked", "waiting", "dead", "retried", "resolved"];
  table("counts", [["spout", "text"], ...names.map((name) => [name, "number"])],
    Object.entries(s.counts.spouts).map(([spout, one]) => ({ cells: [spout, ...names.map((name) => number(one[name]))] })));
};

const showExpectations = (batches) => {
  const sums = new Map();
  for (const batch of batches)
    for (const [component, some] of Object.entries(batch.expectations))
      for (const [name, counts] of Object.entries(some)) {
        const key = JSON.stringify([component, name]), before = sums.get(key) ?? { passed: 0, failed: 0 };
        sums.set(key, { passed: before.passed + counts.passed, failed: before.failed + counts.failed });
      }
  byId("expected").hidden = !sums.size;
  table("expectations", [["component", "text"], ["expectation", "text"], ["passed", "number"], ["failed", "number"]],
    [...sums].map(([key, one]) => ({ cells: [...JSON.parse(key), number(one.passed), number(one.failed)] })));
};

const showUsage = (batches) => {
  const sums = new Map();
  for (const batch of batches)
    for (const kind of ["spent", "tokens"])
      for (const [bolt, keys] of Object.entries(batch[kind]))
        for (const [key, amount] of Object.entries(keys)) {
          const name = JSON.stringify([bolt, key]), one = sums.get(name) ?? { spent: 0, tokens: 0 };
          one[kind] += amount;
          sums.set(name, one);
        }
  byId("usage").hidden = !sums.size;
  const largest = [...sums].sort(([, a], [, b]) => b.spent - a.spent || b.tokens - a.tokens).slice(0, 100);
  table("used", [["bolt", "text"], ["key of the limit", "text"], ["cost", "number"], ["tokens", "number"]],
    largest.map(([name, one]) => ({ cells: [...JSON.parse(name), String(+one.spent.toPrecision(6)), number(one.tokens)] })));
};

// -- charts --------------------------------------------------------------------------------------

const H = 170, LEFT = 68, RIGHT = 10, TOP = 8, BOTTOM = 22;
let W = 640;
const frame = (id, name, top, label) => {
  W = Math.max(300, byId(id).clientWidth);
  const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${name}, up to ${label(top)}` });
  for (const part of [0, 0.5, 1]) {
    const y = TOP + (H - TOP - BOTTOM) * (1 - part);
    svg.append(shape("line", { x1: LEFT, x2: W - RIGHT, y1: y, y2: y }));
    const text = shape("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" });
    text.textContent = label(top * part);
    svg.append(text);
  }
  return svg;
};
const ends = (svg, from, to, width = W, height = H) => {
  for (const [x, anchor, value] of [[LEFT, "start", from], [width - RIGHT, "end", to]]) {
    const text = shape("text", { x, y: height - 6, "text-anchor": anchor });
    text.textContent = value;
    svg.append(text);
  }
};
const empty = (id) => byId(id).replaceChildren(make("p", "no micro-batch yet", "quiet"));
const short = (n) => n >= 1e6 ? `${+(n / 1e6).toFixed(1)} M` : n >= 1e3 ? `${+(n / 1e3).toFixed(1)} k` : String(Math.round(n));

const outcomes = (b) =>
  `${number(b.acked)} acked, ${number(b.failed - b.uncounted)} failed${b.uncounted ? `, ${number(b.uncounted)} put off` : ""}`;
const showThroughput = (batches) => {
  if (!batches.length) return empty("throughput");
  const top = Math.max(1, ...batches.map((b) => b.records_per_s));
  const svg = frame("throughput", "records per second of the last micro-batches", top, short), wide = (W - LEFT - RIGHT) / batches.length;
  batches.forEach((b, n) => {
    const high = (H - TOP - BOTTOM) * b.records_per_s / top;
    svg.append(shape("rect", { class: "c0", x: LEFT + n * wide + wide * 0.1, width: Math.min(wide * 0.8, 40), y: H - BOTTOM - high, height: Math.max(high, 0.5) },
      `micro-batch ${b.batch_id}: ${number(b.records_per_s)} records/s, ${outcomes(b)}`));
  });
  ends(svg, `micro-batch ${batches[0].batch_id}`, batches.length > 1 ? String(batches.at(-1).batch_id) : "");
  byId("throughput").replaceChildren(svg);
};

const showLatency = (batches) => {
  if (!batches.length) return empty("latency");
  const names = ["p50", "p95", "p99"];
  const top = Math.max(1, ...batches.map((b) => 1000 * b.latency_s.p99));
  const svg = frame("latency", "latency of acked records in the last micro-batches", top, span);
  const x = (n) => batches.length < 2 ? (LEFT + W - RIGHT) / 2 : LEFT + (W - LEFT - RIGHT) * n / (batches.length - 1);
  names.forEach((name, n) => {
    const points = batches.flatMap((b, i) => b.acked ? [`${x(i).toFixed(1)},${(H - BOTTOM - (H - TOP - BOTTOM) * 1000 * b.latency_s[name] / top).toFixed(1)}`] : []);
    if (points.length === 1) points.push(points[0].replace(/^[\d.]+/, (at) => String(Number(at) + 3)));
    svg.append(shape("polyline", { class: `l${n}`, points: points.join(" ") }, name));
  });
  ends(svg, `micro-batch ${batches[0].batch_id}`, batches.length > 1 ? String(batches.at(-1).batch_id) : "");
  const legend = make("p", null, "legend");
  ["median", "95th percentile", "99th"].forEach((name, n) => legend.append(key(`k${n}`, name)));
  byId("latency").replaceChildren(svg, legend);
};
const key = (kind, name) => {
  const one = make("span");
  one.append(make("i", null, kind), name);
  return one;
};

const STEPS = ["run", "check", "decide", "act"];
const showTimeline = (all) => {
  const batches = all.slice(-30);
  if (!batches.length) return empty("timeline");
  const wide = Math.max(300, byId("timeline").clientWidth), row = 14, high = batches.length * row + BOTTOM + 4;
  const from = Math.min(...batches.map((b) => b.at_ms - 1000 * b.duration_s)), to = Math.max(...batches.map((b) => b.at_ms));
  const scale = (wide - LEFT - RIGHT) / Math.max(1, to - from);
  const svg = shape("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "the last micro-batches, each from its plan to its end" });
  batches.forEach((b, n) => {
    const y = 2 + n * row;
    const label = shape("text", { x: LEFT - 6, y: y + 10, "text-anchor": "end" });
    label.textContent = b.batch_id;
    svg.append(label);
    let x = LEFT + (b.at_ms - 1000 * b.duration_s - from) * scale;
    const known = STEPS.map((name) => [name, 1000 * (b.steps_s[name] ?? 0)]);
    const rest = Math.max(0, 1000 * b.duration_s - known.reduce((sum, [, ms]) => sum + ms, 0));
    const told = `micro-batch ${b.batch_id}: ${span(1000 * b.duration_s)}, ${outcomes(b)}, ${number(b.dead)} dead; ${Object.entries(b.steps_s).map(([name, s]) => `${name} ${span(1000 * s)}`).join(", ")}`;
    [...known, ["rest", rest]].forEach(([, ms], kind) => {
      if (!ms) return;
      svg.append(shape("rect", { class: `c${kind}`, x, y, width: Math.max(ms * scale, 0.8), height: row - 4 }, told));
      x += ms * scale;
    });
  });
  ends(svg, moment(from), moment(to), wide, high);
  byId("timeline").replaceChildren(svg);
  byId("steps").replaceChildren(...[...STEPS, "all else"].map((name, n) => key(`c${n}`, name)));
};

const showCharts = (batches) => {
  showThroughput(batches); showLatency(batches); showTimeline(batches);
};

const showWaiting = (s) => {
  const top = Math.max(1, ...s.waiting.ages);
  const labels = [...s.ages_ms.map((ms) => `up to ${span(ms)}`), "longer"];
  byId("ages").replaceChildren(...labels.flatMap((label, n) => {
    const meter = make("meter");
    meter.max = top;
    meter.value = s.waiting.ages[n];
    meter.setAttribute("aria-label", label);
    return [make("span", label, "quiet"), meter, make("b", number(s.waiting.ages[n]))];
  }));
  table("waiting", [["component", ""], ["error", ""], ["records", "number"], ["oldest", "number"], ["for example", "text"]],
    s.waiting.reasons.slice(0, 12).map((r) => ({ cells: [r.component, r.error_type, number(r.records), span(Math.max(0, s.at_ms - r.oldest_ms)), r.message.slice(0, 200)] })));
  table("dead", [["spout", ""], ["component", ""], ["error", ""], ["letters", "number"], ["last died", "time"], ["for example", "text"]],
    s.dead.reasons.slice(0, 20).map((r) => ({
      cells: [r.spout, r.component, r.error_type, number(r.records), moment(r.newest_ms), r.message.slice(0, 200)],
      act: () => {
        const form = byId("search");
        form.elements.component.value = r.component;
        form.elements.error.value = r.error_type;
        form.requestSubmit();
      },
    })));
};

// -- dead letters --------------------------------------------------------------------------------

const pretty = (text) => {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
};
const showLetters = async () => {
  const query = new URLSearchParams(new FormData(byId("search"))), mine = ++searches;
  try {
    const found = await ask(`api/${at}/letters?${query}`);
    if (mine !== searches) return;
    table("letters", [["choose", ""], ["letter", ""], ["died", "time"], ["component", ""], ["error", ""], ["attempts", "number"], ["replays", "number"], ["sent", "number"], ["message and record", "text"]],
      found.letters.map((letter) => {
        const box = make("input");
        box.type = "checkbox";
        box.value = letter.id;
        box.setAttribute("aria-label", `choose ${letter.id}`);
        const choice = make("td");
        choice.append(box);
        const record = make("td", null, "text"), more = make("details");
        more.append(make("summary", letter.error_message.slice(0, 160) || "(no message)"), make("pre", letter.error_message), make("pre", pretty(letter.payload)));
        record.append(more);
        return { cells: [choice, letter.id, moment(letter.last_ms), letter.component, letter.error_type, letter.attempts, letter.replays, letter.sent, record] };
      }));
    const many = found.letters.length;
    byId("found").textContent = many === found.limit ? `the newest ${many}` : many ? `${many} letters` : found.none_found;
    trouble(damage(found.damaged));
  } catch (error) { trouble(error); }
};

const send = async (event) => {
  event.preventDefault();
  const chosen = [...document.querySelectorAll("#letters input:checked")].map((box) => box.value);
  const told = byId("sent");
  if (!chosen.length) { told.textContent = "choose letters first"; return; }
  try {
    const done = await ask(`api/${at}/replay`, {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${byId("replay").elements.token.value}` },
      body: JSON.stringify({ letters: chosen }),
    });
    const many = Object.values(done.records).reduce((all, one) => all + one, 0);
    const often = Object.values(done.left_out).reduce((all, one) => all + one, 0);
    const sent = many ? `${many} replayed, request ${done.request}` : often ? "none" : "none: they were replayed before";
    told.textContent = often ? `${sent}; ${often} skipped: replayed too often` : sent;
    await showLetters();
  } catch (error) { told.textContent = error.message; }
};

// -- the whole -----------------------------------------------------------------------------------

const refresh = async () => {
  clearTimeout(timer);
  const mine = ++refreshes;
  if (!document.hidden) {
    try {
      const found = await ask(`api/${at}/status`);
      if (mine !== refreshes) return;
      state = found;
      showHead(state); showTiles(state); showCounts(state); showWaiting(state);
      showExpectations(state.batches);
      showUsage(state.batches);
      showCharts(state.batches);
      const shown = `api/${at}/topology.svg?done=${state.last_done}`;
      if (shown !== drawn) byId("topology").src = drawn = shown;
      trouble(damage(state.dead.damaged));
    } catch (error) { trouble(error); }
    document.body.dataset.ready = "yes";
  }
  if (mine === refreshes) timer = setTimeout(refresh, EVERY_MS);
};

// The drawing fills the room, up to twice its size; a drawing that does not fit can be scrolled.
const sizeTopology = () => {
  const drawing = byId("topology");
  const natural = drawing.naturalWidth;
  drawing.style.width = `${Math.min(2 * natural, Math.max(0.75 * natural, drawing.parentNode.clientWidth))}px`;
};

const begin = async () => {
  const { checkpoints, replay } = await ask("api/checkpoints");
  const choice = byId("checkpoint");
  checkpoints.forEach((path, n) => { const one = make("option", path); one.value = n; choice.append(one); });
  choice.addEventListener("change", () => { at = Number(choice.value); refresh(); showLetters(); });
  byId("replay").hidden = !replay;
  byId("no-replay").hidden = replay;
  byId("search").addEventListener("submit", (event) => { event.preventDefault(); showLetters(); });
  byId("replay").addEventListener("submit", send);
  document.addEventListener("visibilitychange", refresh);
  window.addEventListener("resize", () => { sizeTopology(); if (state) showCharts(state.batches); });
  byId("topology").addEventListener("load", sizeTopology);
  await Promise.all([refresh(), showLetters()]);
};
begin().catch(trouble);
