// The other views: the plan without some peers, models, this node, events.
import { html, useEffect, useState } from "/static/vendor/htm-preact.js";
import { Action, Cards, Notice, Pairs, Table, bytes, clock, count, flops, loss, nameOf, seconds, share } from "/static/parts.js";
import { get, program, store, typed, withToken } from "/static/store.js";

export function Plan() {
  const runs = [...store.runs.values()].filter((run) => run.plan).reverse();
  const [chosen, setChosen] = useState(""), [without, setWithout] = useState([]), [answer, setAnswer] = useState(null);
  const run = runs.find((each) => each.run === chosen) || runs[0];
  useEffect(() => {
    if (!run) return;
    const wanted = new URLSearchParams({ run: run.run, without: without.join() });
    let is_old = false;
    get(`/api/whatif?${wanted}`).then((got) => got.json()).then((got) => { if (!is_old) setAnswer(got); })
      .catch((error) => setAnswer({ error: error.message }));
    return () => { is_old = true; };
  }, [run && run.run, run && run.plan.plan, run && run.step, without.join()]);
  if (!run) return html`<h1>Plan</h1><${Notice}>No run on this node has a plan. To plan without a run: <code>${program} plan MODEL</code><//>`;
  const peers = [...new Set(run.plan.stages.flatMap((stage) => stage.replicas))];
  const toggle = (key) => setWithout(without.includes(key) ? without.filter((each) => each !== key) : [...without, key]);
  return html`<h1>Plan</h1>
    <div class="tools"><label>Run<select value=${run.run} onChange=${(event) => { setChosen(event.target.value); setWithout([]); }}>
      ${runs.map((each) => html`<option value=${each.run}>${each.run.slice(0, 8)} ${each.model}</option>`)}</select></label></div>
    <fieldset><legend>What if these peers were gone?</legend>${peers.map((key) => html`<label style="margin-right:16px"><input type="checkbox"
      checked=${without.includes(key)} onChange=${() => toggle(key)} /> ${nameOf(key)}</label>`)}</fieldset>
    ${!answer ? html`<p class="quiet" role="status">Asking...</p>` : answer.error ? html`<${Notice} kind="bad">${answer.error}<//>` : html`
      <${Cards} rows=${[["step now", seconds(answer.step_seconds)], ["step then", answer.is_feasible ? seconds(answer.predicted_seconds) : "none", answer.is_feasible ? "" : "bad"],
        ["rate then", answer.is_feasible && answer.rate_share != null ? share(answer.rate_share) : "-"]]} />
      <${Notice} kind=${answer.is_feasible ? "" : "warn"}>${answer.text}<//>
      <${Table} caption="Stages" heads=${["Stage", "Layers", "Now", "Then", "Busy now", "Busy then"]} rows=${answer.stages.map((stage) =>
        [stage.stage, stage.stage + 1, `${stage.layers[0]}-${stage.layers[1] - 1}`, stage.replicas.map(nameOf).join(", "),
          stage.left.map(nameOf).join(", ") || "nobody", share(stage.busy), share(stage.busy_then)])} />
      <${Planned} found=${answer.planned} />`}`;
}

// New plans by the planner of `peerloom plan`: with all live peers, and without the chosen ones.
function Planned({ found }) {
  if (!found) return html`<p class="quiet">This node is not in the run, so it cannot make a new plan.</p>`;
  const { now, then } = found;
  return html`<h2>A new plan</h2>${then.is_feasible ? html`<${Cards} rows=${[["samples/s with all", now.is_feasible ? now.samples_per_second.toPrecision(3) : "-"],
      ["then", then.samples_per_second.toPrecision(3)], ["step then", seconds(then.step_seconds)], ["rate then", share(found.rate_share)]]} />
    <${Table} caption="Stages of the plan without them" heads=${["Stage", "Layers", "Peers", "Takes", "Memory"]} rows=${then.stages.map((stage, index) =>
      [index, index + 1, stage.layers.join("-"), stage.peers.join(", "), seconds(stage.seconds), bytes(stage.memory_bytes)])} />`
    : html`<${Notice} kind="bad">${then.text}<//>`}`;
}

export function Models() {
  const runs = [...store.runs.values()].reverse();
  return html`<h1>Models</h1>
    <${Table} caption=${`Models and the runs that train them. To fetch one: ${program} runs fetch RUN`}
      heads=${["Model", "Data", "Run", "Status", "Loss", "Accuracy", "Result", "Weights"]} rows=${runs.map((run) => [run.run, run.model, run.data,
        html`<a href=${`/run/${run.run}`}><code>${run.run.slice(0, 8)}</code></a>`, html`<span class=${run.status}>${run.status}</span>`,
        loss(run.loss), loss(run.accuracy), run.result || "-", html`<code>${run.weights.slice(0, 16)}</code>`])} />`;
}

export function ThisNode() {
  const node = store.node, capacity = node.capacity, limits = node.limits, reach = node.reachability;
  const counters = Object.entries(node.counters).filter(([, number]) => number);
  return html`<h1>This node: ${node.name}</h1>
    <${Pairs} rows=${[["peer", html`<code>${node.peer}</code>`], ["swarm", `${node.swarm}${node.is_private ? " (private)" : ""}`],
      ["listening", node.addresses.join(", ") || "-"], ["data folder", html`<code>${node.data_dir}</code>`],
      ["up", node.started ? seconds(Math.max(0, store.at - node.started)) : "-"],
      ["reachable", !reach ? "not tested" : reach.relays?.length && !reach.reachable ? "through relays" : ({ true: "yes", false: "no" }[reach.reachable] || `not known yet (${reach.asked} of ${reach.of} tried)`)],
      ["router", [reach?.mapping, reach?.nat].filter(Boolean).join("; ") || "-"]]} />
    <h2>Offer</h2>
    ${capacity ? html`<${Cards} rows=${[["device", capacity.device], ["cores", capacity.cores], ["free memory", bytes(capacity.memory_free_bytes)],
      ["of", bytes(capacity.memory_total_bytes)], ["measured speed", flops(capacity.flops_per_second)]]} />` : html`<p class="quiet">Not measured yet.</p>`}
    <${Pairs} rows=${Object.entries(limits).map(([name, value]) => [name.replaceAll("_", " "), value === "" ? "-" : String(value)])} />
    <p class="quiet">These are set at the start by flags, <code>PEERLOOM_*</code> or the file. To change one until this node stops:</p>
    <p><${Action} name="limits" label=${limits.accept_runs === "never" ? "Accept stages of others" : "Accept no more stages"}
      body=${{ accept_runs: limits.accept_runs === "never" ? "swarm" : "never" }} /></p>
    <h2>Checks</h2>
    ${node.fences ? html`<${Notice} kind=${node.fences.unfenced.length ? "warn" : ""}>${node.fences.unfenced.length
      ? `Fences are incomplete: ${node.fences.unfenced.join("; ")}` : "Each stage is confined to its own files, memory and processor, and has no network."}<//>` : ""}
    <p>All checks: <code>${program} doctor</code></p>
    <${Table} caption="Addresses tried" heads=${["Address", "Outcome", "Detail", "Took"]} rows=${node.joins.map((join) =>
      [join.address, html`<code>${join.address}</code>`, html`<span class=${join.outcome === "ok" ? "good" : "warn"}>${join.outcome}</span>`, join.detail, seconds(join.seconds)])} />
    <${Table} caption="Counters" heads=${["What", "Count"]} numbers=${[1]} rows=${counters.map(([name, number]) => [name, name.replaceAll("_", " "), count(number)])} />
    <p><${Action} name="leave" what="leave the swarm and stop this node" label="Leave" sure body=${{}} /></p>`;
}

export function Events() {
  const [kind, setKind] = useState(""), [text, setText] = useState("");
  const kinds = [...new Set(store.events.map((event) => event.kind))].sort();
  const found = store.events.filter((event) => (!kind || event.kind === kind) &&
    (!text || JSON.stringify(event).toLowerCase().includes(text.toLowerCase())));
  return html`<h1>Events</h1>
    <div class="tools">
      <label>Kind<select value=${kind} onChange=${(event) => setKind(event.target.value)}><option value="">all</option>
        ${kinds.map((each) => html`<option>${each}</option>`)}</select></label>
      <label>Find<input type="search" value=${text} onInput=${(event) => setText(event.target.value)} /></label>
      <a href=${withToken(`/api/export?${new URLSearchParams({ kind, text })}`)} download="events.jsonl">Export as JSON lines</a>
      <span class="quiet" role="status">${count(found.length)} of the latest ${count(store.events.length)}</span>
    </div>
    <${Table} caption="Newest first" heads=${["When", "Kind", "What"]} rows=${found.slice(-200).reverse().map((event) =>
      [event.number, clock(event.at_seconds), event.kind, html`<code>${brief(event)}</code>`])} />`;
}

const HIDDEN = ["kind", "at", "at_seconds", "number"];
const brief = (event) => Object.entries(event).filter(([name, value]) => !HIDDEN.includes(name) && value !== "" && value !== null &&
  !(Array.isArray(value) && !value.length)).map(([name, value]) => `${name}=${typeof value === "string" ? shortened(value) : JSON.stringify(value)}`).join(" ").slice(0, 400);
const shortened = (value) => (/^12D3KooW/.test(value) ? nameOf(value.slice(-12)) : typed(value));
