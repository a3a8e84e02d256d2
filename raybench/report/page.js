// Light or dark by a button, and what a mark of a chart stands for where it is pointed at.
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
})();
