// The swarm: its members, which ones were lost and why, and which peer noticed.
import { html, useState } from "/static/vendor/htm-preact.js";
import { Cards, Notice, Table, ago, bytes, count, flops, nameOf, seconds, short } from "/static/parts.js";
import { elsewhere, store } from "/static/store.js";
import { Topology } from "/static/topology.js";

const ROWS = 100;
const ORDER = { suspect: 0, dead: 1, alive: 2, left: 3 };

export function Swarm() {
  const [filter, setFilter] = useState(""), [status, setStatus] = useState(""), [rows, setRows] = useState(ROWS);
  const members = [...store.members.values()];
  const of = (wanted) => members.filter((member) => member.status === wanted).length;
  const alive = members.filter((member) => member.status === "alive");
  const text = filter.toLowerCase();
  const found = members
    .filter((member) => (!status || member.status === status) && (!text ||
      [member.name, member.key, member.address, member.location, member.reason].some((value) => value.toLowerCase().includes(text))))
    .sort((one, other) => ORDER[one.status] - ORDER[other.status] || (one.name < other.name ? -1 : one.name > other.name ? 1 : 0));
  return html`<h1>Swarm</h1>
    <${Cards} rows=${[
      ["alive", count(of("alive") + 1), "good"], ["suspect", count(of("suspect")), of("suspect") ? "warn" : ""],
      ["dead", count(of("dead")), of("dead") ? "bad" : ""], ["left", count(of("left"))],
      ["offered memory", bytes(alive.reduce((sum, member) => sum + member.memory_free_bytes, 0))],
      ["offered speed", flops(alive.reduce((sum, member) => sum + member.flops_per_second, 0))],
    ]} />
    ${members.length ? "" : html`<${Notice}>No other member yet. On another machine: <code>${elsewhere} --join
      ${" "}${store.node.join_address || "ADDRESS"}</code><//>`}
    <${Topology} />
    <p class="quiet">Lines lead to peers that have proved their identity to this node. Drag or use arrows to move, the wheel or + - to zoom, 0 to fit.</p>
    <div class="tools">
      <label>Find<input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></label>
      <label>Status<select value=${status} onChange=${(event) => setStatus(event.target.value)}>
        <option value="">all</option>${Object.keys(ORDER).map((name) => html`<option>${name}</option>`)}</select></label>
      <span class="quiet">${count(found.length)} of ${count(members.length)}</span>
    </div>
    <${Table} caption="Members, including lost ones" numbers=${[7, 8]}
      heads=${["Name", "Peer", "Status", "Since", "Noticed by", "Found through", "Way", "Latency", "Offers", "Region", "Address"]}
      rows=${found.slice(0, rows).map((member) => [member.key, member.name || "-", html`<code>${short(member.key)}</code>`,
        html`<span class=${member.status}>${member.status}${member.reason ? `: ${member.reason}` : ""}</span>`, ago(member.since),
        member.noticed_by ? nameOf(member.noticed_by) : "-", member.found_through || "-", store.ways.get(member.key) || (store.links.has(member.key) ? "direct" : "-"), latency(member.key),
        member.flops_per_second ? flops(member.flops_per_second) : "-", member.location || "-", html`<code>${member.address}</code>`])} />
    ${found.length > rows ? html`<button onClick=${() => setRows(rows * 4)}>Show more</button>` : ""}`;
}

function latency(key) {
  const known = store.links.get(key);
  if (known === undefined) return "no link";
  return known ? seconds(known) : "linked";
}
