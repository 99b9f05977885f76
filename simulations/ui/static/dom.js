// Elements, requests, and numbers. Text only ever becomes text: nothing of a run is parsed as HTML.
export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);
export const say = (text) => { byId("said").textContent = text; };

const answers = new Map();  // path -> etag and body of the last answer
export async function get(path) {
  const known = answers.get(path);
  const answer = await fetch(path, {cache: "no-store", headers: known ? {"If-None-Match": known.tag} : {}})
    .catch(({message}) => { throw new Error(`No answer (${message}): is 'fedsign ui' still running?`); });
  if (answer.status === 304) return known.body;
  const body = answer.headers.get("content-type")?.includes("json") ? await answer.json() : {error: await answer.text()};
  if (!answer.ok) throw new Error(body.error ?? answer.statusText);
  if (answers.size > 50) answers.delete(answers.keys().next().value);
  answers.set(path, {tag: answer.headers.get("etag"), body});
  return body;
}

export async function post(path, content) {
  const token = document.querySelector("meta[name=token]").content;
  const answer = await fetch(path, {method: "POST", body: JSON.stringify(content), headers: {"X-FedSign-Token": token}});
  const body = answer.headers.get("content-type")?.includes("json") ? await answer.json() : {error: await answer.text()};
  if (!answer.ok) throw new Error(body.error);
  return body;
}

export const isShare = (key) => /(^|[._])accuracy$/.test(key);

export function number(value) {
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US").replace("-", "−");
  const text = size >= 1e6 || size < 1e-4 ? value.toExponential(1) : size < 100 ? value.toPrecision(3) : Math.round(value).toLocaleString("en-US");
  return text.replaceAll("-", "−");
}

const scaled = (value, step, units) => {
  let place = 0;
  while (value >= 0.9995 * step && place < units.length - 1) { value /= step; place++; }
  return `${value.toFixed(place && value < 100 ? 1 : 0)} ${units[place]}`;
};
export const bytes = (value) => scaled(value, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
export const duration = (seconds) => seconds < 60 ? `${seconds.toFixed(1)} s` : seconds < 3600 ?
  `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} min`;

export function shown(key, value) {  // a setting as it was written, a result with its significant digits
  if (value == null) return "–";
  if (typeof value !== "number") return value === "" ? "–" : value;
  if (key === "done.findings" && !value) return "–";
  if (key === "done.bytes") return bytes(value);
  if (key === "done.seconds") return duration(value);
  if (isShare(key)) return `${(100 * value).toFixed(1)} %`;
  return /^(last|best)\./.test(key) ? number(value) : String(value);
}

const TITLES = {"done.rounds": "rounds", "done.bytes": "bytes", "done.seconds": "time", "done.failures": "failures", "done.findings": "findings"};
export const title = (key) => TITLES[key] ?? key.replace(/\.name$/, "").replace(/^(last|best)\./, "$1 ");

export function table(caption, heads, rows) {  // heads: [text, isNumber]
  const cells = (row) => row.map((cell, i) => i ? h(`td${heads[i][1] ? ".number" : ""}`, {}, cell) : h("th", {scope: "row"}, cell));
  return h("div.scroll", {tabindex: 0, role: "region", "aria-label": caption}, h("table.cells", {},
    h("thead", {}, h("tr", {}, heads.map(([text, isNumber], i) => h(`th${isNumber && i ? ".number" : ""}`, {scope: "col"}, text)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, cells(row))))));
}
