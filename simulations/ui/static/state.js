// What is shown, in the address after #: a view can be bookmarked, and the back button works.
const FIELDS = {filter: "", sort: "started", asc: "", columns: "", ids: "", keys: "", x: "rounds", smooth: "1", logx: "", logy: "", offset: "0", parent: ""};

export function read() {
  const [view, query] = location.hash.slice(1).split("?");
  const given = new URLSearchParams(query ?? "");
  const state = {view: view || "runs", isGiven: query != null && given.has("ids")};
  for (const [name, usual] of Object.entries(FIELDS)) state[name] = given.get(name) ?? usual;
  state.ids = state.ids.split(",").filter((id) => /^[0-9a-f]{16}$/.test(id));
  for (const name of ["columns", "keys"]) state[name] = state[name].split(",").filter(Boolean);
  return state;
}

export function address(state) {
  const query = new URLSearchParams();
  for (const [name, usual] of Object.entries(FIELDS)) {
    const value = String(state[name]);
    if (value !== usual || name === "ids" && state.isGiven) query.set(name, value);
  }
  return `#${state.view}${query.size ? `?${query}` : ""}`;
}

export function write(changes) {
  const state = {...read(), ...changes};
  if ("ids" in changes) state.isGiven = true;
  history.replaceState(null, "", address(state));
  dispatchEvent(new Event("hashchange"));
}

export const viewQuery = (state, key) => new URLSearchParams({
  ids: state.ids.join(","), key, x: state.x, smooth: state.smooth, logx: state.logx, logy: state.logy});
