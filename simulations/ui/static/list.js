// The list: filter, sort, columns, pages; each row can join the overlay.
import {byId, get, h, number, say, shown, title} from "./dom.js";
import {address, read, write} from "./state.js";

const PAGE = 100;
export const NEWEST = 5;  // runs in the overlay until others are chosen
export const MOST = 40;

export function build() {
  let typed;
  const filter = h("input.filter", {id: "filter", type: "search", autocomplete: "off", spellcheck: "false", "aria-describedby": "hint",
    placeholder: "strategy.name=fedsign  lr<0.1  best.accuracy>0.9", value: read().filter,
    oninput: () => { clearTimeout(typed); typed = setTimeout(() => write({filter: filter.value, offset: "0"}), 200); }});
  return h("section.list", {"aria-labelledby": "list-title"},
    h("div.head", {}, h("h2", {id: "list-title"}, "Runs"), h("span.soft", {id: "count"}), columnsMenu()),
    h("div.tools", {}, h("label", {for: "filter"}, "Filter"), filter),
    h("p.hint.soft.small", {id: "hint"}, "A setting or metric, then = != < > ~ and a value; other words are looked for in names and tags."),
    h("p.problem", {id: "filter-problem", role: "alert", hidden: true}),
    h("p.parent", {id: "parent", hidden: true}),
    h("div.scroll", {tabindex: 0, role: "region", "aria-label": "Runs"},
      h("table.cells.runs", {}, h("caption.hidden", {}, "Runs with their settings and metrics"), h("thead", {id: "heads"}), h("tbody", {id: "rows"}))),
    h("p.soft", {id: "empty", hidden: true}),
    h("nav.pages", {"aria-label": "Pages", id: "pages"}),
    h("div.skipped", {id: "skipped"}));
}

export async function update() {
  const state = read();
  const query = new URLSearchParams({filter: state.filter, sort: state.sort, ascending: state.asc, columns: state.columns.join(","),
    offset: state.offset, limit: PAGE, parent: state.parent});
  const problem = byId("filter-problem");
  let list;
  try {
    list = await get(`/api/list?${query}`);
  } catch (error) {
    problem.hidden = false;
    if (problem.textContent !== error.message) problem.textContent = error.message;
    return null;
  }
  problem.hidden = true;
  if (!byId("rows")) return list;
  if (!state.isGiven && !state.filter && list.rows.length && !list.index.is_building) {
    state.ids = list.rows.slice(0, NEWEST).map((row) => row.id);
    write({ids: state.ids});
  }
  const key = JSON.stringify([list, state.ids]);
  if (key !== update.key || !byId("rows").children.length) show(list, state);
  update.key = key;
  return list;
}

function show(list, state) {
  const count = `${list.count.toLocaleString("en-US")} ${list.count === 1 ? "run" : "runs"}`;
  if (byId("count").textContent !== count) say(count);
  byId("count").textContent = count;
  heads(list);
  const old = new Map([...byId("rows").children].map((row) => [row.dataset.id, row]));
  const rows = list.rows.map((row) => line(old.get(row.id) ?? frame(row), row, list, state));
  // only if rows have come, gone, or moved: a click or the focus on one would be lost
  if (rows.length !== old.size || rows.some((row, i) => row !== byId("rows").children[i])) byId("rows").replaceChildren(...rows);
  const empty = byId("empty");
  empty.hidden = list.count > 0 || list.index.is_building;
  empty.textContent = state.filter || state.parent ? "No run matches the filter." :
    `No runs in ${list.roots.join(" or ")} yet: 'fedsign run' makes one, and it appears here by itself.`;
  const offset = Number(state.offset), last = Math.min(offset + PAGE, list.count);
  const turn = (text, to, isOff) => h("button", {type: "button", disabled: isOff, onclick: () => write({offset: String(to)})}, text);
  byId("pages").replaceChildren(...(list.count <= PAGE ? [] : [turn("Previous", Math.max(0, offset - PAGE), !offset),
    `${(offset + 1).toLocaleString("en-US")} to ${last.toLocaleString("en-US")}`, turn("Next", offset + PAGE, last >= list.count)]));
  byId("skipped").replaceChildren(...(list.index.skipped.length ? [h("details", {}, h("summary", {}, `${list.index.skipped.length} folders were skipped`),
    h("ul", {}, list.index.skipped.slice(0, 200).map((text) => h("li", {}, text))))] : []));
  const parent = byId("parent");
  parent.hidden = !state.parent;
  parent.replaceChildren("The cells of a comparison. ", h("a", {href: address({...state, parent: "", offset: "0"})}, "Show all runs"));
}

function heads(list) {
  const key = JSON.stringify([list.columns, list.sort, list.descending]), focused = document.activeElement?.closest("th")?.title;
  if (byId("heads").dataset.key === key) return;
  byId("heads").dataset.key = key;
  byId("heads").replaceChildren(h("tr", {}, h("th", {scope: "col"}, h("span.hidden", {}, "in the overlay")), head("started", "run", list),
    list.columns.filter((each) => each !== "status").map((each) => head(each, title(each), list))));
  [...byId("heads").querySelectorAll("th")].find((each) => focused && each.title === focused)?.querySelector("button").focus();
}

function head(key, text, list) {
  const isSorted = list.sort === key, ways = {true: "descending", false: "ascending"};
  return h("th", {scope: "col", "aria-sort": isSorted ? ways[list.descending] : "none", title: key},
    h("button.sort", {type: "button", onclick: () => write({sort: key, asc: isSorted && list.descending ? "1" : "", offset: "0"})},
      text, h("span", {"aria-hidden": "true"}, isSorted ? list.descending ? " ↓" : " ↑" : "")));
}

function frame(row) {  // what stays of a row while its numbers change
  const parts = row.name.split("/"), leaf = parts.pop();
  const choose = (event) => {
    const ids = read().ids.filter((id) => id !== row.id);
    if (event.target.checked && ids.length >= MOST) {
      event.target.checked = false;
      say(`At most ${MOST} runs can be overlaid.`);
    } else write({ids: event.target.checked ? [...ids, row.id] : ids});
  };
  return h("tr", {"data-id": row.id}, h("td.pick", {}, h("input.choose", {type: "checkbox", "aria-label": `Overlay ${row.name}`, onchange: choose})),
    h("th", {scope: "row"}, h("span.status-dot", {role: "img"}), h("a", {href: `#run/${row.id}`}, parts.at(-1) ?? leaf, h("span.leaf", {}, leaf)), h("span.more")));
}

function line(made, row, list, state) {
  const place = state.ids.indexOf(row.id), status = row.facts.status ?? "damaged";
  const check = made.querySelector("input"), dot = made.querySelector(".status-dot");
  check.checked = place >= 0;
  check.className = place < 0 ? "choose" : `choose c${place % 8 + 1}`;
  made.ariaSelected = place >= 0;
  const key = JSON.stringify([row, list.columns]);
  if (made.dataset.key === key) return made;
  made.dataset.key = key;
  dot.className = `status-dot ${/^\w+$/.test(status) ? status : ""}`;
  dot.ariaLabel = dot.title = status;
  const cell = (key) => {
    const value = row.facts[key];
    if (key === "done.rounds") return h("td.number", {}, `${number(value ?? 0)}`, h("span.soft", {}, ` / ${number(row.facts.rounds ?? 0)}`), progress(row.facts));
    return h(`td${typeof value === "number" ? ".number" : ""}`, {title: value}, shown(key, value));
  };
  made.querySelector(".more").replaceChildren(...(row.facts.tags ?? "").split(", ").filter(Boolean).map((tag) => h("span.tag", {}, tag)),
    ...(row.facts.note ? [h("span.written", {}, row.facts.note)] : []), ...row.notes.map((note) => h("span.problem.small", {}, note)));
  [...made.querySelectorAll("td:not(.pick)")].forEach((each) => each.remove());
  made.append(...list.columns.filter((each) => each !== "status").map(cell));
  return made;
}

const progress = (facts) => facts.status === "running" &&
  h("progress", {max: facts.rounds ?? 1, value: facts["done.rounds"] ?? 0, "aria-label": "rounds done"});

function columnsMenu() {
  const found = h("div.found"), search = h("input", {type: "search", "aria-label": "Find a setting or metric", placeholder: "Find a setting or metric", oninput: () => fill()});
  let keys = [];
  const fill = () => {
    const columns = read().columns.length ? read().columns : update.key ? JSON.parse(update.key)[0].columns : [];
    const matching = keys.filter((key) => key.name.includes(search.value)).slice(0, 60);
    found.replaceChildren(...matching.map((key) => {
      const box = h("input", {type: "checkbox", onchange: () => write({columns: box.checked ? [...columns, key.name] : columns.filter((each) => each !== key.name)})});
      box.checked = columns.includes(key.name);
      return h("label", {}, box, key.name, key.values > 1 && h("span.soft", {}, ` ${key.values.toLocaleString("en-US")} values`));
    }));
  };
  const menu = h("details.menu", {ontoggle: async () => { if (menu.open) { keys = await get("/api/keys"); fill(); search.focus(); } },
    onkeydown: (event) => { if (event.key === "Escape") { menu.open = false; menu.firstChild.focus(); } }},
    h("summary", {}, "Columns"), h("div.panel", {}, search, found));
  addEventListener("hashchange", () => menu.open && fill());
  document.addEventListener("click", (event) => { if (!menu.contains(event.target) && event.target.isConnected) menu.open = false; });
  return menu;
}

export function comparisons(list) {
  return list.rows.map((row) => [
    h("a", {href: `#runs?parent=${row.id}&ids=`}, row.name), shown("", row.facts.strategies), shown("", row.facts.metric),
    shown("", row.facts.seeds), h("a", {href: `#runs?parent=${row.id}&ids=`, "aria-label": `Cells of ${row.name}`}, `${row.facts.cells ?? 0} cells`),
    shown("done.findings", row.facts["done.findings"])]);
}
