// The data of the page: one snapshot, then deltas by server-sent events. The browser reconnects by itself and
// sends the number of its latest delta. The node answers with the later deltas, or with a new snapshot.

export const EVENTS_MAX = 2000;
export const POINTS_MAX = 4000;

export const store = {
  link: "loading", at: 0, node: null, members: new Map(), runs: new Map(), courses: new Map(), events: [],
  links: new Map(), ways: new Map(), alerts: [], number: -1, skew: 0,
};
// How a person types our commands in the shell of this node, and on a different machine.
export const { program, elsewhere } = document.getElementById("page").dataset;
// Texts name a command as a code span that begins with `peerloom`.
export const typed = (text) => text.replace(/`peerloom((?: [^`]*)?)`/g, (_, rest) => program + rest);
const listeners = new Set();
let planned = false;

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function changed() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    for (const listener of listeners) listener();
  });
}

let columns = [];
const member = (row) => Object.fromEntries(columns.map((name, index) => [name, row[index]]));

export function reset(message) {
  columns = message.member_columns;
  store.members = new Map(message.members.map((row) => [row[0], member(row)]));
  store.runs = new Map(message.runs.map((run) => [run.run, run]));
  store.events = message.events;
  store.node = message.node;
  store.links = new Map(Object.entries(message.links || {}));
  store.ways = new Map(Object.entries(message.ways || {}));
  store.alerts = message.alerts || [];
  store.number = message.number;
  store.at = message.at;
  store.courses.clear();
  store.skew = message.at - Date.now() / 1000;
  store.link = "live";
  changed();
}

export function apply(message) {
  for (const row of message.members || []) store.members.set(row[0], member(row));
  for (const key of message.gone || []) store.members.delete(key);
  for (const run of message.runs || []) store.runs.set(run.run, run);
  for (const run of message.runs_gone || []) store.runs.delete(run);
  if (message.node) store.node = message.node;
  if (message.links) store.links = new Map(Object.entries(message.links));
  if (message.ways) store.ways = new Map(Object.entries(message.ways));
  if (message.alerts) store.alerts = message.alerts;
  if (message.events) store.events = store.events.concat(message.events).slice(-EVENTS_MAX);
  for (const [run, points] of Object.entries(message.points || {})) extend(run, "points", points, message.number);
  for (const [run, marks] of Object.entries(message.marks || {})) extend(run, "marks", marks, message.number);
  store.number = message.number;
  store.at = message.at;
  store.skew = message.at - Date.now() / 1000;
  store.link = "live";
  changed();
}

function extend(run, what, rows, number) {
  const course = store.courses.get(run);
  if (!course || !course.points || number <= course.number) return;
  course[what] = course[what].concat(rows);
  if (course[what].length > POINTS_MAX) course[what] = course[what].filter((_, index) => index % 2 === 0);
  course.version += 1;
}

// A run's course is fetched once a person views it; from then on deltas extend it.
export function course(run) {
  const known = store.courses.get(run);
  if (known) return known;
  const fresh = { points: null, marks: [], reading: [], number: 0, version: 0, error: "" };
  store.courses.set(run, fresh);
  get(`/api/run/${encodeURIComponent(run)}`).then(async (answer) => {
    const document = await answer.json();
    if (!answer.ok) throw new Error(document.error);
    Object.assign(fresh, { points: [] }, document.course, document);
  }).catch((error) => { fresh.error = String(error.message || error); fresh.points = []; })
    .finally(() => { fresh.version += 1; changed(); });
  return fresh;
}

export const now = () => Date.now() / 1000 + store.skew;

export function connect() {
  if (!token()) return lock();
  const source = new EventSource(withToken("/api/stream"));
  source.addEventListener("reset", (event) => reset(JSON.parse(event.data)));
  source.addEventListener("delta", (event) => apply(JSON.parse(event.data)));
  source.onerror = () => {
    store.link = store.node ? "lost" : "unreachable";
    changed();
    if (source.readyState === EventSource.CLOSED) setTimeout(again, 2000);
  };
  source.onopen = () => { if (store.node) { store.link = "live"; changed(); } };
}

// If a stream is refused, the token may be missing.
const again = () => get("/api/view").then((got) => (got.status === 401 ? lock() : connect()), connect);
function lock() {
  store.link = "locked";
  changed();
}

// The token follows the # in the printed link, and stays in this window. Streams and downloads
// cannot have headers, so their token is in the query.
const given = /token=([0-9a-f]+)/.exec(location.hash);
if (given) {
  sessionStorage.setItem("token", given[1]);
  history.replaceState(null, "", location.pathname);
}
const token = () => sessionStorage.getItem("token") || "";
export const get = (path) => fetch(path, { headers: { "x-peerloom-token": token() } });
export const withToken = (path) => `${path}${path.includes("?") ? "&" : "?"}token=${token()}`;

export const post = (path, body, signal) => fetch(path, {
  method: "POST", body: JSON.stringify(body || {}), signal,
  headers: { "content-type": "application/json", "x-peerloom-token": token() },
});

export async function act(name, argumentsGiven) {
  const answer = await post(`/api/actions/${name}`, argumentsGiven);
  const document = await answer.json();
  if (!answer.ok) throw new Error(document.error || answer.statusText);
  return document.result;
}
