// The frame of the page: navigation by URL, the state of the connection to the node, light and dark mode.
import { html, render, useEffect, useErrorBoundary, useState } from "/static/vendor/htm-preact.js";
import { Chat } from "/static/chat.js";
import { Events, Models, Plan, ThisNode } from "/static/others.js";
import { Notice, named } from "/static/parts.js";
import { Run } from "/static/run.js";
import { connect, program, store, subscribe } from "/static/store.js";
import { Swarm } from "/static/swarm.js";

const VIEWS = [["/", "Swarm", Swarm], ["/run", "Run", Run], ["/plan", "Plan", Plan], ["/models", "Models", Models],
  ["/chat", "Chat", Chat], ["/node", "This node", ThisNode], ["/events", "Events", Events]];
const SAYS = { loading: "connecting...", live: "live", lost: "connection lost; trying again", unreachable: "the node does not answer",
  locked: "locked" };

const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;

function App() {
  const [path, setPath] = useState(location.pathname), [, again] = useState(0);
  useEffect(() => subscribe(() => again((number) => number + 1)), []);
  useEffect(() => {
    const moved = () => setPath(location.pathname);
    addEventListener("popstate", moved);
    return () => removeEventListener("popstate", moved);
  }, []);
  const go = (to) => { history.pushState(null, "", to); setPath(to); };
  const follow = (event, to) => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    go(to);
  };
  const view = VIEWS.find(([at]) => at === `/${path.split("/")[1]}`) || VIEWS[0];
  useEffect(() => { document.title = `${view[1]} - ${store.node ? store.node.name : "Peerloom"}`; });
  return html`<a class="skip" href="#main">Skip to content</a>
    <header><strong>Peerloom</strong>
      <nav aria-label="Views">${VIEWS.map(([at, name]) => html`<a href=${at} aria-current=${at === view[0] ? "page" : null}
        onClick=${(event) => follow(event, at)}>${name}</a>`)}</nav>
      <span class="grow"></span>
      <span class=${`live ${{ live: "good", lost: "warn", unreachable: "bad", locked: "warn" }[store.link] || ""}`} role="status">
        ${store.node ? `${store.node.name}: ` : ""}${SAYS[store.link]}</span>
      <button onClick=${turn} aria-label="Light or dark">${"◐"}</button>
    </header>
    <main id="main" tabindex="-1">
      ${store.alerts.map((alert) => html`<${Notice} kind=${alert.level}><strong>${alert.kind}</strong> ${named(alert.text)}<//>`)}
      <${Guarded} key=${view[0]} show=${view[2]} id=${decodeURIComponent(path.split("/")[2] || "")} go=${go} /></main>`;
}

function Guarded({ show: Shown, id, go }) {
  const [error, clear] = useErrorBoundary();
  if (error) {
    return html`<${Notice} kind="bad">This view failed: ${String(error.message || error)} <button onClick=${clear}>Try again</button><//>`;
  }
  if (store.link === "locked") {
    return html`<${Notice} kind="warn">Open this page with the link from <code>${program} page</code><//>`;
  }
  if (!store.node) {
    return store.link === "unreachable"
      ? html`<${Notice} kind="bad">The node does not answer. Is it running? <code>${program} status</code><//>`
      : html`<p class="quiet" role="status">Loading...</p>`;
  }
  return html`<${Shown} id=${id} go=${go} />`;
}

function turn() {
  const is_dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = is_dark ? "light" : "dark";
  localStorage.setItem("theme", is_dark ? "light" : "dark");
}

render(html`<${App} />`, document.getElementById("page"));
connect();
