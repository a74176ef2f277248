// A chat with a served model: the holders of its layers, the conversation, and what happens when a peer dies.
// The conversation stays in this window, and is sent to the node with each question. The browser stores it only
// if the person ticks that.
import { html, useEffect, useRef, useState } from "/static/vendor/htm-preact.js";
import { Notice, clock, count, layers, nameOf, seconds } from "/static/parts.js";
import { changed, elsewhere, get, post, program, store, typed } from "/static/store.js";

const LOOK_MS = 1500, KEEP = "chat", LOST_SHOWN = 60, QUIET = 1.5;
const talk = {
  service: "", turns: [], going: null, kept: false, draft: "", settings: { system: "", temperature: "", tokens: 512 },
  route: [], lost: [], services: null, error: "", texts: {},
};
try { Object.assign(talk, JSON.parse(localStorage.getItem(KEEP) || "{}")); } catch { localStorage.removeItem(KEEP); }

function keep() {
  const { service, turns, settings } = talk;
  if (talk.kept) localStorage.setItem(KEEP, JSON.stringify({ service, turns, settings, kept: true }));
  else localStorage.removeItem(KEEP);
  changed();
}

async function look() {
  try {
    const answer = await get("/api/services"), found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    Object.assign(talk, { services: found.services, error: "" });
    const chosen = service();
    if (chosen && chosen.answers && !talk.texts[chosen.service]) {
      talk.texts[chosen.service] = chosen.text === "tokenizer" ? { asking: true } : { text: chosen.text };
      if (chosen.text === "tokenizer") {
        const told = await get(`/api/service-text?service=${chosen.service}`), text = await told.json();
        talk.texts[chosen.service] = told.ok ? text : null;
      }
    }
  } catch (error) { talk.error = String(error.message || error); }
  changed();
}

const service = () => (talk.services || []).find((each) => each.service === talk.service)
  || (talk.services || []).find((each) => each.answers && !each.vector) || (talk.services || [])[0];

// Questions and answers must alternate, as templates require. So a question without any answer is not sent again.
function sent() {
  const { turns } = talk, found = [];
  for (let index = 0; index < turns.length; index += 2) {
    const pair = turns.slice(index, index + 2), is_last = index + 2 >= turns.length;
    if (is_last) pair.length = 1;
    if (is_last || pair[1].content) found.push(...pair.map(({ role, content }) => ({ role, content })));
  }
  return found;
}

async function say(text) {
  const chosen = service();
  if (talk.going || !chosen || !text.trim()) return;
  talk.turns.push({ role: "user", content: text.trim() });
  talk.draft = "";
  await answer(chosen);
}

async function again() {
  const last = talk.turns[talk.turns.length - 1];
  if (talk.going || !last) return;
  const before = last.role === "assistant" ? talk.turns.pop().content : null;
  await answer(service(), before);
}

async function answer(chosen, before) {
  const { system, temperature, tokens } = talk.settings, is_chat = (talk.texts[chosen.service] || {}).has_template;
  const turn = { role: "assistant", content: "", lines: [], tokens: 0, began: performance.now(), first: 0, newest: 0 };
  const asked = talk.turns[talk.turns.length - 1].content;
  talk.service = chosen.service;
  talk.turns.push(turn);
  const question = { tokens_max: Number(tokens) || 512 };
  if (temperature !== "") question.temperature = Number(temperature);
  if (is_chat) question.messages = [...(system ? [{ role: "system", content: system }] : []), ...sent()];
  else question.prompt = asked;
  talk.going = new AbortController();
  changed();
  try {
    const got = await post("/api/chat", { service: chosen.service, question }, talk.going.signal);
    if (!got.ok) {
      const problem = await got.json();
      turn.lines.push({ kind: "bad", text: problem.error, more: problem.do });
    } else await read(got.body, (kind, told) => take(turn, kind, told));
    if (!turn.over && got.ok) turn.lines.push({ kind: "bad", text: "The connection to the node broke during the answer." });
  } catch (error) {
    turn.lines.push(error.name === "AbortError" ? { kind: "", text: "Stopped." } : { kind: "bad", text: "The node does not answer.", more: String(error.message) });
  }
  if (before && before === turn.content) turn.lines.push({ kind: "", text: "This is the same answer, because temperature 0 always takes the likeliest token." });
  Object.assign(talk, { going: null, route: [] });
  keep();
}

function take(turn, kind, told) {
  const now = performance.now();
  if (kind === "piece") {
    if (!turn.first) turn.first = now;
    if (turn.pause) {
      turn.pause.text += ` after ${seconds((now - turn.newest) / 1000)}; the answer continues.`;
      turn.pause = null;
    }
    turn.content += told.text;
    turn.tokens = told.tokens;
    turn.newest = now;
  } else if (kind === "moved") {
    const lost = told.lost.map(nameOf).join(", ") || "a peer", by = told.route.filter((key) => !talk.route.includes(key));
    turn.pause = { kind: "warn", text: `${clock(Date.now() / 1000)} ${lost} lost (${told.reason}); ${by.length ? `${by.map(nameOf).join(", ")} took over` : "others took over"}`,
      more: told.exact ? "" : "The new machines may round differently, so the text may differ from here on." };
    turn.lines.push(turn.pause);
    talk.lost.push(...told.lost.map((key) => ({ key, at: Date.now() / 1000 })));
  } else if (kind === "error") turn.lines.push({ kind: "bad", text: told.error, more: told.do });
  else if (kind === "end") {
    Object.assign(turn, { over: told, pause: null });
    if (told.finish === "length") turn.lines.push({ kind: "", text: `Cut off after ${count(told.tokens)} tokens.` });
    if (told.forgotten) turn.lines.push({ kind: "", text: `The ${count(told.forgotten)} oldest messages were left out, because the chat is longer than the model's context.` });
  }
  if (told.route) talk.route = told.route;
  changed();
}

async function read(body, on) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const kind = /^event: (.*)$/m.exec(block), data = /^data: (.*)$/m.exec(block);
      if (kind && data) on(kind[1], JSON.parse(data[1]));
    }
  }
}

export function Chat() {
  const [, tick] = useState(0), place = useRef(null), foot = useRef(null);
  useEffect(() => {
    look();
    const looking = setInterval(() => document.hidden || look(), LOOK_MS), ticking = setInterval(() => talk.going && tick((n) => n + 1), 250);
    return () => { clearInterval(looking); clearInterval(ticking); };
  }, []);
  const near = innerHeight + scrollY >= document.documentElement.scrollHeight - 160;
  useEffect(() => { if (talk.going && near) foot.current?.scrollIntoView({ block: "end" }); });
  if (talk.error && !talk.services) return html`<h1>Chat</h1><${Notice} kind="bad">The services could not be listed: ${talk.error}<//>`;
  if (!talk.services) return html`<h1>Chat</h1><p class="quiet" role="status">Looking for models...</p>`;
  const chosen = service();
  if (!chosen) return html`<h1>Chat</h1><${Empty} />`;
  const text = talk.texts[chosen.service] || {}, last = talk.turns[talk.turns.length - 1];
  const able = chosen.answers && !text.asking && chosen.text !== "" && !chosen.vector;
  const submit = (event) => { event.preventDefault(); say(talk.draft); place.current.focus(); };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    else if (event.key === "ArrowUp" && !talk.draft) { talk.draft = [...talk.turns].reverse().find((each) => each.role === "user")?.content || ""; changed(); event.preventDefault(); }
  };
  const stop = (event) => { if (event.key === "Escape" && talk.going) talk.going.abort(); };
  return html`<div onKeyDown=${stop}><h1>Chat</h1>
    <div class="tools"><label>Model<select value=${chosen.service} disabled=${!!talk.going} onChange=${(event) => { talk.service = event.target.value; keep(); look(); }}>
      ${talk.services.map((each) => html`<option value=${each.service}>${each.name}${each.answers ? "" : " (does not answer)"}</option>`)}</select></label>
      <span class="quiet">${count(chosen.context)} tokens of context, published by ${nameOf(chosen.publisher)}</span></div>
    <${Stages} of=${chosen} />
    <p class="quiet">The peers that hold a stage can read your questions and the answers.</p>
    <${Hint} of=${chosen} text=${text} />
    <div role="log" aria-label="Conversation" aria-busy=${!!talk.going}><ol class="talk">${talk.turns.map((turn, index) => html`<${Turn} key=${index} turn=${turn} going=${talk.going && turn === last} />`)}</ol></div>
    <form class="say" onSubmit=${submit}><label>Your message<textarea ref=${place} rows="3" value=${talk.draft} onKeyDown=${keys} disabled=${!able}
      onInput=${(event) => { talk.draft = event.target.value; changed(); }}></textarea></label>
      <div class="tools">${talk.going ? html`<button type="button" key="stop" onClick=${() => { talk.going.abort(); place.current.focus(); }}>Stop</button>`
        : html`<button key="send" disabled=${!able || !talk.draft.trim()}>Send</button>`}
        <button type="button" disabled=${!!talk.going || !able || !last} onClick=${again}>${last && last.lines?.some((line) => line.kind === "bad") ? "Try again" : "Regenerate"}</button>
        <button type="button" disabled=${!!talk.going || !last} onClick=${() => { talk.turns = []; talk.lost = []; keep(); place.current.focus(); }}>New conversation</button>
        <span class="quiet">Enter sends, Shift+Enter begins a new line, Escape stops</span></div></form>
    <${Settings} /><span ref=${foot}></span></div>`;
}

const Empty = () => html`<${Notice}>No model is served in this swarm yet. Serve one from any node: <code>${program} serve MODEL</code><//>
  <ul><li><code>${program} serve ~/models/qwen-small</code>: a folder in the format of transformers</li>
    <li><code>${program} serve words.peerloom --replicas 2</code>: a captured model with two replicas of each stage, so that an answer survives the death of a peer</li>
    <li><code>${program} serve RUN</code>: the model that a run has trained, by the run's id</li></ul>
  <p class="quiet">It then appears here. To let another machine hold stages: <code>${elsewhere} --join ${store.node.join_address || "ADDRESS"}</code></p>`;

function Hint({ of, text }) {
  const missing = of.stages.findIndex((rows) => !rows.length);
  if (missing >= 0) return html`<${Notice} kind="warn">No peer holds stage ${missing + 1} of ${of.name}. A node with a free slot will take it: <code>${elsewhere} --join
    ${" "}${store.node.join_address || "ADDRESS"}</code><//>`;
  if (of.vector) return html`<${Notice} kind="warn">${of.name} computes vectors of texts and cannot chat. Programs use <code>/v1/embeddings</code><//>`;
  if (of.text === "") return html`<${Notice} kind="warn">${of.name} takes only tokens, no text. Serve it with its tokenizer: <code>${program} serve MODEL --tokenizer FILE</code><//>`;
  if (text.asking) return html`<p class="quiet" role="status">Fetching its tokenizer...</p>`;
  return text.has_template ? "" : html`<p class="quiet">${of.name} has no chat template. It continues each of your texts as it is, without the earlier ones.</p>`;
}

// The present holders of the layers, in the order in which tokens pass. The route of the current answer is marked.
function Stages({ of }) {
  const now = Date.now() / 1000, here = new Set(of.stages.flat().map((row) => row.peer));
  const lost = talk.lost.filter((each) => now - each.at < LOST_SHOWN && !here.has(each.key));
  const going = talk.going && talk.service === of.service;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Holders of the layers"><ol class="strip chain">
    ${of.stages.map((rows, index) => { const [first, end] = of.layers[index]; return html`${index ? html`<li class="arrow" aria-hidden="true">${"→"}</li>` : ""}
      <li class=${`stage ${rows.length ? "" : "bad"}`}><strong>stage ${index + 1}</strong> <span class="quiet">${end == null ? first ? `layers ${first} to the last` : "all layers" : layers(first, end)}</span>
        <ul>${rows.map((row) => html`<li key=${row.peer} class=${going && talk.route[index] === row.peer ? "on" : ""}>${nameOf(row.peer)}${row.peer === store.node.key ? " (this node)" : ""}
          <span class="quiet"> ${going && talk.route[index] === row.peer ? "answering you; " : ""}${count(row.sessions)} open</span>
          ${row.tokens_max ? html`<meter min="0" max=${row.tokens_max} value=${row.tokens} aria-label=${`${nameOf(row.peer)} keeps ${count(row.tokens)} of ${count(row.tokens_max)} tokens`}></meter>` : ""}</li>`)}
          ${rows.length ? "" : html`<li>nobody</li>`}</ul></li>`; })}</ol>
    ${lost.length ? html`<p class="bad">${"✕"} lost: ${lost.map((each) => `${nameOf(each.key)} at ${clock(each.at)}`).join(", ")}</p>` : ""}</div>`;
}

function Turn({ turn, going }) {
  const mine = turn.role === "user", over = turn.over || {};
  return html`<li class=${mine ? "mine" : "theirs"}><strong class="quiet">${mine ? "You" : "Model"}</strong>
    <div class="text">${mine ? turn.content : blocks(turn.content)}${going ? html`<span class="caret" aria-hidden="true"></span>` : ""}</div>
    ${(turn.lines || []).map((line) => html`<p class=${`line ${line.kind}`} role="status">${typed(line.text)}${line.more ? ` ${typed(line.more)}` : ""}</p>`)}
    ${mine ? "" : html`<p class="quiet line">${pace(turn, over, going)}</p>`}</li>`;
}

// Code between fences has its own font, and scrolls separately. No character is left out.
function blocks(content) {
  const found = [];
  let code = false, text = "";
  const put = () => { if (text) found.push(code ? html`<code class="block" tabindex="0">${text}</code>` : text); text = ""; };
  for (const line of content.split(/(?<=\n)/)) {
    const fence = /^ {0,3}```/.test(line);
    if (fence && !code) { put(); code = true; text = line; continue; }
    text += line;
    if (fence) { put(); code = false; }
  }
  put();
  return found;
}

function pace(turn, over, going) {
  const now = performance.now(), first = over.first_seconds ?? (turn.first ? (turn.first - turn.began) / 1000 : null);
  if (first == null) return going ? `reading, ${seconds((now - turn.began) / 1000)}` : "";
  const rate = over.tokens_per_second ?? (turn.tokens > 1 ? (turn.tokens - 1) / ((turn.newest - turn.first) / 1000) : null);
  const quiet = going && (now - turn.newest) / 1000;
  return [`first token ${seconds(first)}`, rate ? `${rate.toPrecision(3)} tokens/s` : "", `${count(turn.tokens)} tokens`,
    quiet > QUIET ? `no token for ${seconds(quiet)}` : ""].filter(Boolean).join(", ");
}

function Settings() {
  const set = (name) => (event) => { talk.settings[name] = event.target.value; keep(); };
  const { system, temperature, tokens } = talk.settings;
  return html`<details><summary>Settings</summary><div class="tools">
    <label>System prompt<input value=${system} size="40" onChange=${set("system")} /></label>
    <label>Temperature (empty: the model's default)<input type="number" min="0" max="2" step="0.1" value=${temperature} onChange=${set("temperature")} /></label>
    <label>Maximum tokens of an answer<input type="number" min="1" max="100000" value=${tokens} onChange=${set("tokens")} /></label></div>
    <p><label><input type="checkbox" checked=${talk.kept} onChange=${(event) => { talk.kept = event.target.checked; keep(); }} /> Keep this conversation in this browser</label>
      <span class="quiet"> Otherwise it is lost when this window closes.</span></p></details>`;
}
