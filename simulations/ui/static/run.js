// One run: facts, findings, clients, sites, failures, configuration; and resuming it.
import {byId, bytes, duration, get, h, number, post, say, shown, table, title} from "./dom.js";
import * as overlay from "./overlay.js";
import {read} from "./state.js";

const part = (id) => h("section.part", {id, hidden: true});
export const build = () => h("div", {}, h("div", {id: "run-head"}), h("p.problem", {id: "run-problem", role: "alert", hidden: true}), part("findings"),
  h("section", {"aria-label": "Curves"}, h("h2", {}, "Curves"), h("div.charts", {}, h("div", {id: "chart-0"}), h("div", {id: "chart-1"}))),
  part("clients"), part("sites"), part("members"), part("failures"), part("settings"));

const contents = new WeakMap();
function fill(id, data, make) {  // only what has changed is replaced, so that focus and open details stay
  const holder = byId(id), key = JSON.stringify(data);
  if (contents.get(holder) === key) return;
  contents.set(holder, key);
  const children = make(data) || [];  // a section without rows is empty
  holder.hidden = !children.length;
  holder.replaceChildren(...children.filter(Boolean));
}

export async function update(id) {
  let run;
  try {
    run = await get(`/api/run/${id}`);
  } catch (error) {
    byId("run-problem").hidden = false;
    byId("run-problem").textContent = error.message;
    return;
  }
  if (!byId("run-head")) return;
  document.title = `${run.name} · FedSign`;
  fill("run-head", [run.facts, run.problems, run.resume_failure, run.can_resume, run.has_report], () => head(run));
  fill("findings", run.findings, findings);
  fill("clients", run.clients, clients);
  fill("sites", run.sites, sites);
  fill("members", run.members, members);
  fill("failures", run.failures, failures);
  fill("settings", [run.config, run.environment], () => settings(run));
  const site = run.sites.rows[0]?.last ?? {}, shared = Object.hasOwn(site, run.facts.metric) ? run.facts.metric : "loss";
  if (byId("chart-sites")) await overlay.plain("sites", `/api/run/${id}/sites?key=${encodeURIComponent(shared)}`);
  await overlay.update({...read(), ids: [id], x: "rounds", smooth: "1", logx: "", logy: ""});
}

function head(run) {
  const {facts} = run, status = facts.status ?? "damaged";
  const fact = (name, value, remark) => value != null && h("div", {}, h("dt", {}, name), h("dd", {}, value), remark && h("dd.remark", {}, remark));
  const metric = facts.metric;
  const of = (key) => facts[key] == null ? null : shown(key, facts[key]);
  const parts = run.name.split("/"), leaf = parts.pop();
  return [
    h("div.over", {}, h("a", {href: "#runs"}, "All runs"), run.parent && h("a", {href: `#runs?parent=${run.parent}&ids=`}, "Its comparison"),
      h(`span.status.${/^\w+$/.test(status) ? status : "damaged"}`, {}, status), h("span", {}, facts.started ?? "")),
    h("h1", {}, parts.at(-1) ?? leaf), h("p.path", {}, h("code", {}, run.path)),
    h("p.actions", {}, run.has_report && h("a.button", {href: `/run/${run.id}/report`, target: "_blank", rel: "noopener"}, "Report"),
      run.can_resume && h("button.button", {type: "button", id: "resume", onclick: () => ask(run.id)}, "Resume …")),
    (facts.tags ?? "").split(", ").filter(Boolean).length > 0 && h("p", {}, facts.tags.split(", ").map((tag) => h("span.tag", {}, tag))),
    facts.note && h("p.note-text", {}, facts.note),
    facts.error && h("p.failure", {}, facts.error),
    run.resume_failure && h("p.failure", {role: "alert"}, `Resuming failed: ${run.resume_failure}`),
    ...run.problems.map((text) => h("p.problem", {}, text)),
    h("dl.facts", {}, fact(`last ${metric}`, of(`last.${metric}`), "mean of 5 rounds"), fact(`best ${metric}`, of(`best.${metric}`)),
      fact("rounds", number(facts["done.rounds"] ?? 0), `of ${number(facts.rounds ?? 0)}`), fact("strategy", facts["strategy.name"]), fact("data", facts.data),
      fact("traffic", bytes(facts["done.bytes"] ?? 0)), fact("time", duration(facts["done.seconds"] ?? 0)), fact("failures", number(facts["done.failures"] ?? 0)))];
}

const findings = ({rows}) => rows.length && [h("h2", {}, "Findings"), h("ul.findings", {}, rows.map((each) =>
  h("li", {}, h("b", {}, each.source === "data" ? "Data" : `Round ${each.round}`), h("span", {}, each.remedy ? `${each.message}; ${each.remedy}.` : each.message), h("code.soft", {}, each.rule))))];

function clients({rows, total, classes, missing}) {
  const said = missing.length && h("p.soft.small", {}, `Not recorded: ${missing.join("; ")}.`);
  if (!rows.length) return said && [h("h2", {}, "Clients"), said];
  const squares = (shares) => h("span.squares", {role: "img", "aria-label": shares.map((share, i) => `${classes[i] ?? i}: ${Math.round(100 * share)} %`).join(", ")},
    shares.map((share, i) => h(`i${share ? `.s${Math.max(1, Math.min(6, Math.ceil(6 * share)))}` : ""}`, {title: `${classes[i] ?? i}: ${Math.round(100 * share)} %`})));
  const has = (key) => rows.some((row) => row[key] != null);
  const columns = [["samples", "samples"], ["held", "classes"], ["rounds", "rounds"], ["failures", "failures"], ["loss", "loss"], ["drift", "drift"], ["accuracy", "accuracy"]].filter(([key]) => has(key));
  const hasShares = rows.some((row) => row.shares.length);
  return [h("h2", {}, "Clients"), has("accuracy") && h("p.lead.soft.small", {}, "Accuracy is that on a client’s label distribution, the mean of the last 5 rounds: it shows label skew only."),
    said, rows.length < total && h("p.soft.small", {}, `The ${rows.length} largest of ${total.toLocaleString("en-US")}.`),
    table("Clients", [["client"], ...(hasShares ? [["share of each class"]] : []), ...columns.map(([, text]) => [text, true])], rows.map((row) =>
      [row.client, ...(hasShares ? [squares(row.shares)] : []), ...columns.map(([key]) => row[key] == null ? "–" : key === "accuracy" ? shown("accuracy", row[key]) : number(row[key]))]))];
}

function sites({rows}) {
  if (!rows.length) return null;
  const keys = [...new Set(rows.flatMap((row) => Object.keys(row.last)))].filter((key) => key !== "client");
  return [h("h2", {}, "Sites"), h("div.charts", {}, h("div", {id: "chart-sites"})), table("Sites", [["site"], ...keys.flatMap((key) => /^num_/.test(key) ? [[title(key), true]] : [[`last ${key}`, true], [`best ${key}`, true]])],
    rows.map((row) => [row.name, ...keys.flatMap((key) => [row.last[key], ...(/^num_/.test(key) ? [] : [row.best[key]])].map((value) => shown(`last.${key}`, value)))]))];
}

const listing = (name, heads, {rows, total}, cells) => rows.length && [h("h2", {}, name), rows.length < total && h("p.soft.small", {}, `The first ${rows.length} of ${total.toLocaleString("en-US")}.`),
  table(name, heads, rows.map(cells))];
const members = (found) => listing("Members", [["round"], ["site"], ["event"], ["why"]], found, (each) => [each.round, each.site, each.event, each.why]);
const failures = (found) => listing("Failures", [["round"], ["client"], ["reason"]], found, (each) => [each.round, each.partition, h("span.reason", {}, each.reason)]);
const settings = (run) => run.config && [h("h2", {}, "Configuration"), h("dl.versions", {}, Object.entries(run.environment).map(([key, value]) => h("div", {}, h("dt", {}, key), h("dd", {}, shown("", value))))),
  h("details", {}, h("summary", {}, "As TOML"), h("pre", {}, h("code", {}, run.config)))];

async function ask(id) {
  const opener = document.activeElement;
  let plan;
  try {
    plan = await get(`/api/run/${id}/resume`);
  } catch (error) {
    return say(error.message);
  }
  const problem = h("p.problem", {role: "alert"});
  const go = h("button.button.main", {type: "button", onclick: async () => {
    go.disabled = true;
    try {
      const {process} = await post(`/api/run/${id}/resume`, {digest: plan.digest});
      dialog.close();
      say(`Resumed as process ${process}.`);
    } catch (error) {
      problem.textContent = error.message;
      go.disabled = false;
    }
  }}, "Resume");
  const dialog = h("dialog", {"aria-labelledby": "ask-title", onclose: () => { dialog.remove(); (opener?.isConnected ? opener : byId("main")).focus(); }},
    h("h2", {id: "ask-title"}, "Resume this run?"), h("p", {}, "This command will be started on this machine:"), h("pre", {}, h("code", {}, plan.command)),
    plan.modules.length ? h("div", {}, h("p.caution", {}, "Its configuration names this code, which will be imported and run:"), h("ul", {}, plan.modules.map((name) => h("li", {}, h("code", {}, name)))),
      h("p.soft.small", {}, `Modules are looked for in ${plan.where} and among the installed packages. Resume only what you trust.`)) :
      h("p.soft", {}, "Its configuration names no code of yours: only FedSign’s own is imported."),
    problem, h("p.actions", {}, go, h("button.button", {type: "button", onclick: () => dialog.close()}, "Cancel")));
  document.body.append(dialog);
  dialog.showModal();
}
