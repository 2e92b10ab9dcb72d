"use strict";
// Sort a table by a column: best first, then the other way round, then as it was.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], original = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const value = (row, i) => (row.cells[i].dataset.value === undefined ? null : Number(row.cells[i].dataset.value));
  heads.forEach((head, i) => {
    const first = head.dataset.first;
    head.querySelector("button")?.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const next = now === "none" ? first : now === first ? (first === "ascending" ? "descending" : "ascending") : "none";
      heads.forEach((other) => other.hasAttribute("aria-sort") && other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      const rows = [...original];
      if (next !== "none") {
        rows.sort((a, b) => {
          const x = value(a, i), y = value(b, i);
          return x === null || y === null ? (x === null) - (y === null) : sign * (x - y);
        });
      }
      for (const row of rows) {
        // a difference, or the source by another score, says nothing without the rows above it
        row.hidden = next !== "none" && row.classList.contains("improve");
        body.append(row);
      }
    });
  });
}

// One stream at a time.
const chooser = document.getElementById("stream-chooser");
if (chooser) {
  const parts = [...document.querySelectorAll(".stream")];
  const show = () => parts.forEach((part) => (part.hidden = part.dataset.stream !== chooser.value));
  chooser.addEventListener("change", show);
  chooser.closest(".chooser").hidden = false;
  show();
}

// A legend switches series of its section on and off; with many of them, it begins with those that matter.
for (const legend of document.querySelectorAll(".legend")) {
  const part = legend.closest("section"), buttons = [...legend.querySelectorAll("[data-series]")];
  const show = (button, on) => {
    button.setAttribute("aria-pressed", on);
    for (const group of part.querySelectorAll(`.plot [data-series="${button.dataset.series}"]`)) group.classList.toggle("off", !on);
  };
  for (const button of buttons) button.addEventListener("click", () => show(button, button.getAttribute("aria-pressed") === "false"));
  if (legend.classList.contains("few")) {
    const all = document.createElement("button");
    all.className = "all";
    const few = (on) => {
      all.textContent = on ? "Show all" : "Show fewer";
      all.onclick = () => few(!on);
      for (const button of buttons) show(button, !on || "lead" in button.dataset);
    };
    few(true);
    const item = document.createElement("li");
    item.append(all);
    legend.append(item);
  }
}

// The values of all lines at the pointer, read from what is drawn: data-x and data-y turn a place into a value.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
const undo = { linear: (v) => v, log: (v) => 10 ** v, function: (v) => v * v };
const reader = (text) => {
  const [from, to, low, high, kind] = text.split(" ");
  const value = (place) => undo[kind](+low + ((place - from) / (to - from)) * (high - low));
  // a hundredth of what the axis spans can be told apart
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value(to) - value(from)) / 1.01)));
  return { value, text: (place) => (Number(value(place).toFixed(digits)) || 0).toLocaleString("en", { maximumFractionDigits: digits }) };
};
for (const plot of document.querySelectorAll(".plot[data-x]")) {
  const x = reader(plot.dataset.x), y = reader(plot.dataset.y), names = plot.dataset.names && JSON.parse(plot.dataset.names);
  const lines = [...plot.querySelectorAll('[data-series] > path[style*="fill: none"]')].map((path) => ({
    path,
    points: [...path.getAttribute("d").matchAll(/([ML]) (\S+) (\S+)/g)].map(([, pen, x, y]) => ({ pen, x: +x, y: +y })),
  }));
  const guide = document.createElementNS("http://www.w3.org/2000/svg", "line");
  guide.classList.add("guide");
  const [top, bottom] = plot.dataset.y.split(" ");
  guide.setAttribute("y1", top);
  guide.setAttribute("y2", bottom);
  const height = (points, x) => {
    const i = points.findIndex((point, k) => point.x >= x && (k ? point.pen === "L" && points[k - 1].x <= x : point.x === x));
    if (i < 1) return i ? null : points[0].y;
    const a = points[i - 1], b = points[i];
    return a.x === b.x ? b.y : a.y + ((x - a.x) / (b.x - a.x)) * (b.y - a.y);
  };
  plot.addEventListener("pointermove", (event) => {
    const here = new DOMPoint(event.clientX, event.clientY).matrixTransform(plot.getScreenCTM().inverse()).x;
    const shown = lines.filter(({ path }) => !path.parentNode.classList.contains("off"));
    const near = (a, b) => (Math.abs(b.x - here) < Math.abs(a.x - here) ? b : a);
    const nearest = shown.flatMap(({ points }) => points).reduce(near, { x: Infinity });
    if (nearest.x === Infinity) return hide();
    const head = document.createElement("b");
    head.textContent = names ? names[Math.min(Math.floor(x.value(nearest.x)), names.length - 1)] : `${x.text(nearest.x)} ${plot.dataset.of}`;
    tip.replaceChildren(head);
    const rows = shown.map(({ path, points }) => ({ path, at: height(points, nearest.x) })).filter((row) => row.at !== null);
    for (const { path, at } of rows.sort((a, b) => a.at - b.at)) {
      const row = document.createElement("span"), name = document.createElement("i");
      name.textContent = path.parentNode.querySelector("title").textContent;
      name.style.color = path.style.stroke;
      row.append(name, y.text(at));
      tip.append(row);
    }
    guide.setAttribute("x1", nearest.x);
    guide.setAttribute("x2", nearest.x);
    plot.append(guide);
    tip.hidden = false;
    const left = event.clientX + 16 + tip.offsetWidth < innerWidth ? event.clientX + 16 : event.clientX - 16 - tip.offsetWidth;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY - 20, innerHeight - tip.offsetHeight - 4))}px`;
  });
  const hide = () => {
    tip.hidden = true;
    guide.remove();
  };
  plot.addEventListener("pointerleave", hide);
}

// The theme follows the system until the button is used.
const button = document.getElementById("theme"), root = document.documentElement;
const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
const label = () => (button.textContent = dark() ? "Light" : "Dark");
button.addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  label();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
button.hidden = false;
label();
