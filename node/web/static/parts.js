// Small parts of all views: readable numbers, cards, tables, notices.
import { html, useState } from "/static/vendor/htm-preact.js";
import { act, now, store, typed } from "/static/store.js";

export const count = (number) => (number ?? 0).toLocaleString("en");

export const layers = (first, last) => (last > first ? `layers ${first}-${last}` : `layer ${first}`);

export function bytes(number) {
  if (!number) return "0 B";
  const step = Math.min(4, Math.floor(Math.log10(Math.abs(number)) / 3));
  return `${(number / 1000 ** step).toPrecision(3)} ${["B", "kB", "MB", "GB", "TB"][step]}`;
}

export function seconds(number) {
  if (number == null) return "-";
  if (number < 1) return `${Math.round(number * 1000)} ms`;
  if (number < 120) return `${number.toFixed(number < 10 ? 1 : 0)} s`;
  if (number < 7200) return `${Math.round(number / 60)} min`;
  return number < 172800 ? `${Math.round(number / 3600)} h` : `${Math.round(number / 86400)} d`;
}

export const flops = (number) => (number ? `${(number / 1e9).toPrecision(3)} GFLOP/s` : "-");
export const share = (number) => (number == null ? "-" : `${Math.round(number * 100)} %`);
export const short = (key) => (key ? `…${key.slice(-6)}` : "-");
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
export const loss = (number) => (number == null ? "-" : Number(number).toPrecision(4));

export function nameOf(key) {
  if (store.node && store.node.key === key) return store.node.name;
  const found = store.members.get(key);
  return found && found.name ? found.name : short(key);
}

// Texts of events have keys of peers; replace them with names for people.
export const named = (text) => typed(text).replace(/[1-9A-HJ-NP-Za-km-z]{12}/g, (key) => (store.members.has(key) ? nameOf(key) : key));

export const Cards = ({ rows }) => html`<dl class="cards">${rows.map(([term, value, kind]) => html`
  <div class="card" key=${term}><dt>${term}</dt><dd class=${kind || ""}>${value}</dd></div>`)}</dl>`;

export const Pairs = ({ rows }) => html`<dl class="pairs">${rows.map(([term, value]) => html`
  <dt key=${term}>${term}</dt><dd>${value}</dd>`)}</dl>`;

export function Table({ caption, heads, rows, numbers = [], empty = "none yet" }) {
  if (!rows.length) return html`<p class="quiet">${caption}: ${empty}</p>`;
  const kind = (index) => (numbers.includes(index) ? "number" : "");
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}><table><caption>${caption}</caption>
    <thead><tr>${heads.map((head, index) => html`<th scope="col" class=${kind(index)}>${head}</th>`)}</tr></thead>
    <tbody>${rows.map(([key, ...cells]) => html`<tr key=${key}>${cells.map((cell, index) =>
      html`<td class=${kind(index)}>${cell}</td>`)}</tr>`)}</tbody></table></div>`;
}

export const Notice = ({ kind = "", children }) => html`<p class=${`notice ${kind}`} role="status">${children}</p>`;

// An action asks for confirmation if it cannot be undone.
export function Action({ name, what, body, label, sure }) {
  const [state, setState] = useState("");
  const run = async () => {
    if (sure && state !== "sure") return setState("sure");
    setState("busy");
    try { await act(name, body); setState("done"); } catch (error) { setState(`error: ${error.message}`); }
  };
  return html`<span><button onClick=${run} disabled=${state === "busy"}>${state === "sure" ? `Really ${what}?` : label}</button>
    ${state === "sure" ? html` <button onClick=${() => setState("")}>No</button>` : ""}
    <span role="status" class=${state.startsWith("error") ? "bad" : "quiet"}> ${["", "sure"].includes(state) ? "" : state}</span></span>`;
}

export const ago = (at) => (at ? `${seconds(Math.max(0, now() - at))} ago` : "-");
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
