// Light or dark by a button, what a mark of a chart stands for where it is pointed at, and the table
// of the points sorted and filtered. Without it, the page is whole.
(() => {
  "use strict";
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const tip = document.getElementById("tip");
  // How far beside a mark it may be pointed at: points are small, and fingers are not.
  const REACH = 22;
  let marked = null;

  button.hidden = false;
  button.addEventListener("click", () => {
    const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || preferred) === "dark" ? "light" : "dark";
  });

  const distance = (mark, x, y) => {
    const box = mark.getBoundingClientRect();
    const beside = Math.max(box.left - x, 0, x - box.right);
    const above = Math.max(box.top - y, 0, y - box.bottom);
    return Math.hypot(beside, above);
  };

  const nearest = (chart, x, y) => {
    let best = null;
    let least = REACH;
    for (const mark of chart.querySelectorAll("[aria-label]")) {
      const far = distance(mark, x, y);
      // Of marks that lie on each other the upper one, which comes last.
      if (far <= least) {
        best = mark;
        least = far;
      }
    }
    return best;
  };

  const hide = () => {
    if (marked) marked.classList.remove("on");
    marked = null;
    tip.hidden = true;
  };

  const point = (event) => {
    const chart = event.target.closest(".chart");
    const mark = chart && nearest(chart, event.clientX, event.clientY);
    if (!mark) return hide();
    if (mark !== marked) {
      hide();
      marked = mark;
      mark.classList.add("on");
      tip.textContent = mark.getAttribute("aria-label");
      tip.hidden = false;
    }
    const box = tip.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, innerWidth - box.width - 6);
    const under = event.clientY + 18;
    const top = under + box.height > innerHeight ? event.clientY - box.height - 10 : under;
    tip.style.left = `${Math.max(6, left)}px`;
    tip.style.top = `${Math.max(6, top)}px`;
  };

  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("pointerleave", hide);
  document.addEventListener("scroll", hide, { passive: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });

  // A browser that cannot open what is folded by style alone prints it all the same.
  const folded = () => document.querySelectorAll("details:not(.meanings)");
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...folded()].filter((one) => !one.open);
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of opened) one.open = false;
  });

  const table = document.getElementById("all");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const form = document.getElementById("filter");
  const words = form.querySelector("input");
  const count = form.querySelector("output");

  const value = (row, place) => {
    const cell = row.cells[place];
    const text = cell.dataset.v ?? cell.textContent.replaceAll(",", "");
    return text === "" ? NaN : Number(text.replace("%", ""));
  };
  const compared = (one, other, place) => {
    const [a, b] = [value(one, place), value(other, place)];
    if (!Number.isNaN(a) && !Number.isNaN(b)) return a - b;
    // Numbers before words, and what is empty last.
    if (Number.isNaN(a) !== Number.isNaN(b)) return Number.isNaN(a) ? 1 : -1;
    const [text, second] = [one, other].map((row) => row.cells[place].textContent);
    if (!text || !second) return (text ? 0 : 1) - (second ? 0 : 1);
    return text.localeCompare(second);
  };
  const sort = (head, place) => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const one of heads) one.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const known = (row) => row.cells[place].textContent !== "";
    const ordered = [...rows].sort(
      (a, b) => known(b) - known(a) || (down ? -1 : 1) * compared(a, b, place),
    );
    body.append(...ordered);
  };
  heads.forEach((head, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sort(head, place));
    head.replaceChildren(button);
  });

  const MOST_CHOICES = 24;
  const choices = heads.flatMap((head, place) => {
    if (!head.classList.contains("setting")) return [];
    const found = [...new Set(rows.map((row) => row.cells[place].textContent))];
    if (found.length < 2 || found.length > MOST_CHOICES) return [];
    const label = document.createElement("label");
    const select = document.createElement("select");
    select.add(new Option("all", ""));
    for (const text of found) select.add(new Option(text || "none", text || " "));
    label.append(`${head.textContent} `, select);
    form.insertBefore(label, count);
    return [{ place, select }];
  });
  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const cells = [...row.cells].map((cell) => cell.textContent);
      const text = `${cells.join(" ")} `.toLowerCase();
      const fits =
        wanted.every((word) => text.includes(word)) &&
        choices.every(
          ({ place, select }) => !select.value || cells[place] === select.value.trim(),
        );
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = shown < rows.length ? `${shown} of ${rows.length} points` : "";
  };
  form.hidden = false;
  form.addEventListener("input", filter);
})();
