// A picture of the swarm on a canvas: peers by region around this node, and only verified links, over which the
// peer has proved its identity to this node. The table below has the same information as text.
import { html, useEffect, useRef } from "/static/vendor/htm-preact.js";
import { colour, nameOf, short } from "/static/parts.js";
import { store } from "/static/store.js";

const GOLDEN = Math.PI * (3 - Math.sqrt(5));
const COLOURS = { alive: "--good", suspect: "--warn", dead: "--bad", left: "--quiet" };

// Regions lie on a ring around this node. Within one, peers form a sunflower, nearest links first; its size grows with its members.
export function layout(members, links) {
  const regions = new Map();
  for (const member of members) {
    const name = member.location || "";
    if (!regions.has(name)) regions.set(name, []);
    regions.get(name).push(member);
  }
  const names = [...regions.keys()].sort();
  const radius = (count) => 9 * Math.sqrt(count) + 10;
  const sum = names.reduce((total, name) => total + 2 * radius(regions.get(name).length) + 30, 0);
  const widest = Math.max(0, ...names.map((name) => radius(regions.get(name).length)));
  const ring = Math.max(sum / (2 * Math.PI), names.length === 1 ? 0 : widest + 40);
  const places = [], labels = [];
  let angle = -Math.PI / 2;
  for (const name of names) {
    const group = regions.get(name), size = radius(group.length);
    const room = ((2 * size + 30) / sum) * 2 * Math.PI;
    const x = ring * Math.cos(angle + room / 2), y = ring * Math.sin(angle + room / 2);
    if (names.length > 1) angle += room;
    group.sort((one, other) => (links.get(one.key) ?? 9) - (links.get(other.key) ?? 9) || (one.key < other.key ? -1 : 1));
    const alone = names.length === 1;
    group.forEach((member, index) => {
      const far = alone ? 9 * Math.sqrt(index + 12) : 9 * Math.sqrt(index + 0.5);
      const [cx, cy] = alone ? [0, 0] : [x, y];
      places.push({ member, x: cx + far * Math.cos(index * GOLDEN), y: cy + far * Math.sin(index * GOLDEN) });
    });
    // A single group without a location is the whole swarm, and needs no label.
    if (name || !alone) labels.push({ name: name || "location not given", count: group.length, x: alone ? 0 : x, y: (alone ? 0 : y) - size - (alone ? 34 : 6) });
  }
  return { places, labels };
}

export function Topology() {
  const place = useRef(null), view = useRef({ x: 0, y: 0, zoom: 0 }), picture = useRef(null), planned = useRef(0);
  const draw = () => {
    if (planned.current) return;
    planned.current = requestAnimationFrame(() => { planned.current = 0; paint(place.current, picture.current, view.current); });
  };
  const members = [...store.members.values()];
  const shape = members.map((member) => member.key + member.location).sort().join() + [...store.links.keys()].length;
  if (!picture.current || picture.current.shape !== shape) picture.current = { shape, ...layout(members, store.links) };
  else for (const each of picture.current.places) each.member = store.members.get(each.member.key) || each.member;
  useEffect(draw);
  useEffect(() => {
    const canvas = place.current;
    const resized = new ResizeObserver(draw);
    resized.observe(canvas);
    const wheel = (event) => { event.preventDefault(); zoomBy(view.current, event.deltaY < 0 ? 1.15 : 1 / 1.15); draw(); };
    canvas.addEventListener("wheel", wheel, { passive: false });
    return () => { resized.disconnect(); canvas.removeEventListener("wheel", wheel); };
  }, []);
  const drag = (event) => {
    if (!event.buttons) return;
    view.current.x += event.movementX; view.current.y += event.movementY;
    draw();
  };
  const key = (event) => {
    const step = { Left: [40, 0], Right: [-40, 0], Up: [0, 40], Down: [0, -40] }[event.key.slice(5)];
    if (step) { view.current.x += step[0]; view.current.y += step[1]; }
    else if ("+=".includes(event.key)) zoomBy(view.current, 1.25);
    else if (event.key === "-") zoomBy(view.current, 0.8);
    else if (event.key === "0") Object.assign(view.current, { x: 0, y: 0, zoom: 0 });
    else return;
    event.preventDefault();
    draw();
  };
  return html`<canvas class="canvas" ref=${place} tabindex="0" role="img" onPointerMove=${drag} onKeyDown=${key}
    aria-label=${`${members.length} peers by region, ${store.links.size} verified links; the table below says the same`}></canvas>`;
}

const zoomBy = (view, factor) => { view.zoom = Math.min(8, Math.max(0.1, (view.zoom || view.fit || 1) * factor)); };

function frame(canvas, picture, view) {
  const width = canvas.clientWidth, height = canvas.clientHeight;
  const reach = Math.max(60, ...picture.places.map((each) => Math.max(Math.abs(each.x), Math.abs(each.y) * 1.4))) + 30;
  view.fit = Math.min(2.2, width / 2 / reach, height / 1.4 / reach);
  return { width, height, zoom: view.zoom || view.fit, x: width / 2 + view.x, y: height / 2 + view.y };
}

export function paint(canvas, picture, view) {
  if (!canvas || !picture) return;
  const ratio = devicePixelRatio || 1, at = frame(canvas, picture, view);
  if (canvas.width !== at.width * ratio || canvas.height !== at.height * ratio) {
    canvas.width = at.width * ratio; canvas.height = at.height * ratio;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, at.width, at.height);
  context.translate(at.x, at.y);
  context.scale(at.zoom, at.zoom);
  context.strokeStyle = colour("--line");
  context.lineWidth = 1 / at.zoom;
  context.beginPath();
  for (const { member, x, y } of picture.places) {
    if (store.links.has(member.key) && member.status !== "dead" && member.status !== "left") { context.moveTo(0, 0); context.lineTo(x, y); }
  }
  context.stroke();
  for (const [status, name] of Object.entries(COLOURS)) {
    context.fillStyle = context.strokeStyle = colour(name);
    context.beginPath();
    for (const { member, x, y } of picture.places) {
      if (member.status !== status) continue;
      if (status === "dead") { // a cross, so that colour is not the only difference
        context.moveTo(x - 3, y - 3); context.lineTo(x + 3, y + 3); context.moveTo(x + 3, y - 3); context.lineTo(x - 3, y + 3);
      } else { context.moveTo(x + 3.6, y); context.arc(x, y, 3.6, 0, 2 * Math.PI); }
    }
    if (status === "alive" || status === "suspect") context.fill(); else context.stroke();
  }
  context.fillStyle = colour("--link");
  context.beginPath(); context.arc(0, 0, 6, 0, 2 * Math.PI); context.fill();
  context.fillStyle = colour("--text");
  context.textAlign = "center";
  context.font = `${12 / at.zoom}px system-ui, sans-serif`;
  for (const label of picture.labels) context.fillText(`${label.name} (${label.count})`, label.x, label.y);
  if (picture.places.length * (1 / at.zoom) < 120) {
    for (const { member, x, y } of picture.places) context.fillText(nameOf(member.key) || short(member.key), x, y + 14 / at.zoom + 3);
  }
  context.fillText("this node", 0, 20 / at.zoom);
}
