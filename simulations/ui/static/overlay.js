// The overlay: charts of the chosen runs, the settings in which they differ, and exports.
import {byId, get, h, isShare, shown, table} from "./dom.js";
import {read, viewQuery, write} from "./state.js";

const drawn = new Map();  // place -> what is drawn there
let metrics = [];

export function build() {
  const box = (name, text) => {
    const input = h("input", {type: "checkbox", id: name, onchange: () => write({[name]: input.checked ? "1" : ""})});
    input.checked = read()[name] === "1";
    return h("label.toggle", {}, input, text);
  };
  const over = h("select", {id: "x", onchange: () => write({x: over.value})}, ["rounds", "bytes", "seconds"].map((each) => h("option", {}, each)));
  over.value = read().x;
  let moved;
  const said = (text) => `${text} ${text === "1" ? "round" : "rounds"}`;
  const value = h("output", {for: "smooth"}, said(read().smooth));
  const smooth = h("input", {type: "range", id: "smooth", min: 1, max: 50, value: read().smooth, oninput: () => {
    value.textContent = said(smooth.value);
    clearTimeout(moved);
    moved = setTimeout(() => write({smooth: smooth.value}), 120);
  }});
  return h("section.overlay", {"aria-labelledby": "overlay-title", id: "overlay"},
    h("div.head", {}, h("h2", {id: "overlay-title"}, "Overlay"), h("span.soft", {id: "chosen"}),
      h("button.quiet", {type: "button", id: "clear", onclick: () => write({ids: []})}, "Clear"),
      h("span.exports", {}, h("a", {id: "export-html", download: "fedsign-runs.html"}, "HTML"), h("a", {id: "export-pdf", download: "fedsign-runs.pdf"}, "PDF"))),
    h("div.tools", {role: "group", "aria-label": "Axes and smoothing"}, h("label", {for: "x"}, "over"), over,
      h("span.smooth", {}, h("label", {for: "smooth"}, "mean of"), smooth, value), box("logx", "log x"), box("logy", "log y")),
    h("div.charts", {}, h("div", {id: "chart-0"}), h("div", {id: "chart-1"})),
    h("ul.problems", {id: "problems"}), h("div", {id: "differences"}));
}

export async function update(state = read()) {
  const isEmpty = !state.ids.length;
  if (byId("overlay")) {
    byId("overlay").classList.toggle("is-empty", isEmpty);
    byId("chosen").textContent = isEmpty ? "Choose runs in the list to see their curves." : `${state.ids.length} ${state.ids.length === 1 ? "run" : "runs"}`;
  }
  if (isEmpty) return;
  const known = await get(`/api/keys?ids=${state.ids.join(",")}`);
  metrics = known.toSorted((a, b) => b.entries - a.entries)  // first the metrics that all of them have
    .map((key) => key.name).filter((name) => name.startsWith("last.")).map((name) => name.slice(5));
  const keys = chosenKeys(state);
  if (byId("differences")) {
    const query = viewQuery(state, keys.join(","));
    byId("export-html").href = `/export/view.html?${query}`;
    byId("export-pdf").href = `/export/view.pdf?${query}`;
    differences(await get(`/api/differences?ids=${state.ids.join(",")}`));
  }
  const problems = await Promise.all(keys.map((key, place) => chart(state, key, place)));
  byId("problems")?.replaceChildren(...[...new Set(problems.flat())].map((text) => h("li", {}, text)));
}

export function chosenKeys(state) {
  const usual = [metrics.find(isShare) ?? metrics.find((key) => !/loss|bytes|num_/.test(key)) ?? "loss", "loss"];
  return usual.map((key, place) => state.keys[place] ?? key);
}

const chart = (state, key, place) => draw(place, `/api/chart?${viewQuery(state, key)}`, (found) => frame(found, choice(key, place)));
export const plain = (place, path) => draw(place, path, (found) => frame(found, h("h3", {}, found.title)));

async function draw(place, path, make) {
  const holder = byId(`chart-${place}`);
  if (!holder) return [];
  let found;
  try {
    found = await get(path);
  } catch (error) {
    return [error.message];
  }
  const before = drawn.get(place);
  if (!holder.isConnected || before?.found === found && holder.contains(before.figure)) return found.problems;
  const {figure, plot} = make(found);
  const seen = before?.path === path ? before.view() : null;  // new rounds: where the reader has zoomed to stays
  const isFocused = document.activeElement?.matches("select") && before?.figure.contains(document.activeElement);
  before?.u.destroy();
  holder.replaceChildren(figure);
  if (isFocused) figure.querySelector("select").focus();
  const u = drawChart(plot, found.chart);
  const buttons = [...figure.querySelectorAll(".key")];
  const [low, high] = found.chart.x.limits;
  if (seen?.zoom) u.setScale("x", seen.zoom);
  seen?.off.forEach((name) => buttons.find((button) => button.dataset.name === name)?.click());
  const view = () => ({
    zoom: u.scales.x.min > low || u.scales.x.max < high ? {min: u.scales.x.min, max: u.scales.x.max} : null,
    off: buttons.filter((button) => button.getAttribute("aria-pressed") === "false").map((button) => button.dataset.name)});
  drawn.set(place, {path, found, figure, u, view});
  return found.problems;
}

function choice(key, place) {
  const select = h("select.metric", {"aria-label": "metric", onchange: () => {
    const keys = chosenKeys(read());
    keys[place] = select.value;
    write({keys});
  }}, [...new Set([...metrics, key])].sort().map((each) => h("option", {value: each}, each.replaceAll("_", " "))));
  select.value = key;
  return select;
}

function frame(found, head) {
  const plot = h("div.plot", {role: "img", "aria-label": found.description});
  const figure = h("figure", {}, h("figcaption", {}, head), h("div.legend", {}, found.legend.map((each) =>
    h(`button.key.c${each.color}`, {type: "button", "aria-pressed": "true", "data-name": each.name}, swatch(each), ` ${each.name} `, h("b", {}, each.value))),
  h("output", {})), plot, found.note && h("p.note", {}, found.note));
  return {figure, plot};
}

function swatch(each) {
  const make = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    return element;
  };
  const svg = make("svg", {viewBox: "0 0 26 8", width: 26, height: 8, "aria-hidden": "true"});
  svg.append(make("path", {d: "M1 4H25", class: "line", "stroke-dasharray": each.dash.join(" ")}));
  if (!each.dash.length) svg.firstChild.removeAttribute("stroke-dasharray");
  return svg;
}

function differences({labels, settings}) {
  const holder = byId("differences"), key = JSON.stringify([labels, settings]);
  if (holder.dataset.key === key) return;
  holder.dataset.key = key;
  const rows = Object.entries(settings).map(([name, values]) => [name, ...values.map((value) => shown("", value))]);
  const isOpen = holder.querySelector("details")?.open;
  holder.replaceChildren(...(labels.length < 2 ? [] : rows.length ? [h("details", {open: isOpen}, h("summary", {}, `${rows.length} settings differ`),
    table("Settings that differ", [["setting"], ...labels.map((label) => [label])], rows))] : [h("p.soft", {}, "These runs have the same settings.")]));
}
