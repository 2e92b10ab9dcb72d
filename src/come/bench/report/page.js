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
