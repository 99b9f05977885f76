// Which view is shown, and keeping it up to date while runs are running.
import {byId, duration, get, h, table} from "./dom.js";
import * as list from "./list.js";
import * as overlay from "./overlay.js";
import * as run from "./run.js";
import {read} from "./state.js";

const PAUSE = 2000;  // ms between two looks; an answer that has not changed is empty
let view = "", timer = 0, isBusy = false, isAgain = false;

function build(name) {
  document.title = "FedSign runs";
  byId("main").replaceChildren(name.startsWith("run/") ? run.build() : name === "comparisons" ? h("section.list", {id: "comparisons"}) :
    h("div", {}, overlay.build(), list.build()));
  document.querySelectorAll(".bar nav a").forEach((link) =>
    link.hash === `#${name}` ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current"));
  if (view) { byId("main").focus({preventScroll: true}); scrollTo(0, 0); }
  view = name;
}

async function update() {
  const state = read();
  if (state.view !== view) build(state.view);
  if (state.view.startsWith("run/")) {
    await run.update(state.view.slice(4));
    await progress(await get("/api/list?limit=0"));
  } else if (state.view === "comparisons") {
    const found = await get("/api/list?kind=comparison&sort=name&ascending=1&limit=500");
    comparisons(found);
    progress(found);
  } else {
    const found = await list.update();
    if (found) progress(found);
    await overlay.update();
  }
}

function comparisons(found) {
  const holder = byId("comparisons"), key = JSON.stringify(found.rows);
  if (!holder || holder.dataset.key === key) return;
  holder.dataset.key = key;
  holder.replaceChildren(h("h2", {}, "Comparisons"), found.rows.length ?
    table("Comparisons", [["comparison"], ["strategies"], ["metric"], ["seeds", true], ["runs", true], ["findings", true]], list.comparisons(found)) :
    h("p.soft", {}, "No comparison yet: 'fedsign compare' makes one."));
}

function progress({index, read_only}) {
  const {done, total, seconds, is_building} = index;
  const text = is_building && total > 20 ? `Reading runs: ${done.toLocaleString("en-US")} of ${total.toLocaleString("en-US")}, ${duration(seconds)}` :
    seconds > 1 ? `${total.toLocaleString("en-US")} runs read in ${duration(seconds)}` : "";
  const shown = [text, read_only && "read-only"].filter(Boolean).join(" · ");
  if (byId("state").textContent !== shown) byId("state").textContent = shown;
}

async function tick() {
  if (isBusy) { isAgain = true; return; }
  clearTimeout(timer);
  isBusy = true;
  try {
    if (!document.hidden || !view) await update();
  } catch (error) {
    byId("state").textContent = error.message;
  }
  isBusy = false;
  timer = setTimeout(tick, isAgain ? 0 : PAUSE);
  isAgain = false;
}

addEventListener("hashchange", tick);
document.addEventListener("visibilitychange", tick);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
tick();
