// A run: its pipeline, its curve with everything that happened to it, and what each stage does.
import { html, useMemo, useState } from "/static/vendor/htm-preact.js";
import { Chart } from "/static/chart.js";
import { Action, Cards, Notice, Table, bytes, clock, count, layers, loss, nameOf, named, seconds, share } from "/static/parts.js";
import { course, program, store } from "/static/store.js";

const OVER = ["done", "failed", "stopped"];

export function Run({ id, go }) {
  const runs = [...store.runs.values()].reverse();
  if (!runs.length) return html`<h1>Run</h1><${Notice}>No run yet. Start one here, or with: <code>${program} train RUN.toml</code><//><${Begin} />`;
  const run = store.runs.get(id) || runs.find((each) => !OVER.includes(each.status)) || runs[0];
  const found = course(run.run);
  const member = new Set((run.plan ? run.plan.stages : []).flatMap((stage) => stage.replicas));
  return html`<h1>Run ${run.model} <span class="mono quiet">${run.run.slice(0, 8)}</span></h1>
    <div class="tools"><label>Run<select value=${run.run} onChange=${(event) => go(`/run/${event.target.value}`)}>
      ${runs.map((each) => html`<option value=${each.run}>${each.run.slice(0, 8)} ${each.model} (${each.status})</option>`)}</select></label>
      ${OVER.includes(run.status) ? "" : html`<${Action} name="stop" what="stop this run for all" label="Stop run" sure body=${{ run: run.run }} />
        <${Action} name="save" what="save" label="Save a checkpoint" body=${{ run: run.run }} />`}</div>
    <${Cards} rows=${[
      ["status", run.status, run.status], ["step", `${count(run.step)} of ${count(run.steps)}`], ["loss", loss(run.loss)],
      ["accuracy", run.accuracy == null ? "-" : run.accuracy.toFixed(4)],
      ["samples/s", run.last_step && run.last_step.seconds ? (run.last_step.samples / run.last_step.seconds).toPrecision(3) : "-"],
      ["bubble", run.last_step ? share(run.last_step.bubble) : "-"], ["replayed", count(run.microbatches_replayed)],
      ["peers", count(member.size)],
    ]} />
    ${run.detail || (run.status !== "running" && run.reason) ? html`<${Notice} kind=${run.status === "failed" ? "bad" : "warn"}>${named(run.detail || run.reason)}<//>` : ""}
    <h2>Pipeline</h2><${Strip} run=${run} />
    <${Curves} course=${found} validations=${run.validations || []} />
    <${Table} caption="Events of the run" heads=${["When", "Step", "What", "More"]} numbers=${[1]}
      rows=${found.marks.slice(-60).reverse().map((mark, index) => [`${mark[0]}-${index}`, clock(mark[0]), count(mark[1]),
        html`<span class=${{ death: "bad", leave: "warn", join: "good" }[mark[2]] || ""}>${mark[2]}</span>`, named(mark[3])])} />
    <pre>${found.reading.join("\n")}</pre>
    <details><summary>Start another run</summary><${Begin} /></details>`;
}

const RUN = `model = "simple-cnn"\ndata = "digits"\n\n[train]\nsteps = 300\nbatch = 128\nmicrobatch = 16\noptimizer = "adam"\nlearning_rate = 0.003\n`;

function Begin() {
  const [text, setText] = useState(RUN);
  return html`<p><label>RUN.toml<br /><textarea rows="10" cols="60" spellcheck="false" value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label></p>
    <p><${Action} name="start" label="Start the run" body=${{ text }} /></p>`;
}

function Strip({ run }) {
  if (!run.plan) return html`<p class="quiet">There is no plan yet.</p>`;
  const last = run.last_step || { utilisation: [], sent_bytes: [], returned_bytes: [] };
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Pipeline"><ol class="strip">
    <li class="stage"><strong>data</strong><ul>${(run.plan.trainers.length ? run.plan.trainers : [run.plan.trainer]).map((key) =>
      html`<li>${nameOf(key)}${key === run.plan.trainer ? " (commits)" : ""}</li>`)}</ul></li>
    ${run.plan.stages.map((stage, index) => html`
      <li class="arrow" aria-hidden="true">${"→"}<br />${last.sent_bytes[index - 1] != null ? bytes(last.sent_bytes[index - 1]) : ""}<br />
        ${index && last.returned_bytes[index] != null ? html`${"←"} ${bytes(last.returned_bytes[index])}` : ""}</li>
      <li class="stage"><strong>stage ${index + 1}</strong> <span class="quiet">${layers(stage.layers[0], stage.layers[1] - 1)}</span>
        <ul>${stage.replicas.map((key) => html`<li><${Peer} id=${key} />${stage.standbys.includes(key) ? " (standby)" : ""}</li>`)}</ul>
        ${last.utilisation[index] == null ? "" : html`<meter min="0" max="1" value=${last.utilisation[index]}
          aria-label=${`stage ${index + 1} computes ${share(last.utilisation[index])} of the step`}></meter>
          <span class="quiet">busy ${share(last.utilisation[index])}</span>`}</li>`)}</ol></div>
    ${run.covered ? html`<p class="quiet">Covered: ${run.covered.text}</p>` : ""}
    ${last.seconds == null ? "" : html`<p class="quiet">Last step ${seconds(last.seconds)}; bytes are of that step.</p>`}`;
}

function Peer({ id }) {
  const member = store.members.get(id), own = store.node.key === id;
  const status = own ? "alive" : member ? member.status : "";
  return html`<span class=${status}>${nameOf(id)}${own ? " (this node)" : ""}${status && status !== "alive" ? ` (${status})` : ""}</span>`;
}

const LOSS = [{ label: "loss", stroke: "--link" }];
const LOSSES = [...LOSS, { label: "validation loss", stroke: "--warn", spanGaps: true }];
const RATE = [{ label: "samples/s", stroke: "--good" }];
const SHARES = [{ label: "utilisation", stroke: "--good" }, { label: "bubble", stroke: "--warn" }];

// The validation losses as a column next to the points of the curve: each at the last point before it.
function beside(points, validations) {
  const column = points.map(() => null);
  for (const each of validations) {
    const index = points.findLastIndex((point) => point[0] < each.step);
    if (index >= 0) column[index] = each.loss;
  }
  return column;
}

function Curves({ course: found, validations }) {
  const columns = useMemo(() => {
    const points = found.points || [], column = (index) => points.map((point) => point[index]);
    return { at: column(1), loss: column(2), rate: column(3), bubble: column(4), used: column(5),
      validated: beside(points, validations) };
  }, [found, found.version, validations.length]);
  if (found.points === null) return html`<p class="quiet" role="status">Loading the curve...</p>`;
  if (found.error) return html`<${Notice} kind="bad">The curve could not be read: ${found.error}<//>`;
  if (!found.points.length) return html`<p class="quiet">No step is committed yet.</p>`;
  const last = found.points[found.points.length - 1], first = found.points[0];
  const deaths = found.marks.filter((mark) => mark[2] === "death").length;
  const shared = { marks: found.marks, version: found.version };
  return html`<h2>Course</h2>
    <p class="quiet">Vertical lines: <span class="bad">death</span>, <span class="good">join</span>, plan change, resumption.</p>
    <${Chart} label=${`Loss, from ${loss(first[2])} to ${loss(last[2])}; ${deaths} deaths marked`} series=${validations.length ? LOSSES : LOSS}
      data=${[columns.at, columns.loss, ...(validations.length ? [columns.validated] : [])]} height=${240} ...${shared} />
    <${Chart} label=${`Samples per second, now ${loss(last[3])}`} series=${RATE} data=${[columns.at, columns.rate]} ...${shared} height=${150} />
    <${Chart} label=${`Utilisation ${share(last[5])}, bubble ${share(last[4])}`} series=${SHARES}
      data=${[columns.at, columns.used, columns.bubble]} ...${shared} height=${150} />`;
}
