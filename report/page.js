"use strict";
// One tooltip for mouse, touch and keyboard: marks hold their words in <title> (plain browsers show it) or data-tip.
(() => {
  const tip = document.getElementById("tip");
  let current = null;

  for (const mark of document.querySelectorAll("g.mark")) {
    const title = mark.querySelector("title");
    mark.dataset.tip = title.textContent;
    title.remove(); // or the browser's own tooltip would cover ours
  }

  function show(mark) {
    if (current) current.classList.remove("on");
    current = mark;
    if (!mark) { tip.hidden = true; return; }
    mark.classList.add("on");
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const at = mark.getBoundingClientRect();
    const x = Math.min(Math.max(at.left + at.width / 2 - tip.offsetWidth / 2, 12), innerWidth - tip.offsetWidth - 12);
    const above = at.top - tip.offsetHeight - 8;
    tip.style.transform = `translate(${x}px, ${above > 4 ? above : at.bottom + 8}px)`;
  }

  document.addEventListener("pointerover", (event) => {
    const mark = event.target.closest(".mark");
    if (mark !== current) show(mark);
  });
  addEventListener("scroll", () => show(null), { passive: true });

  for (const figure of document.querySelectorAll("figure[tabindex]")) {
    const marks = [...figure.querySelectorAll(".mark")];
    figure.addEventListener("keydown", (event) => {
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
      if (event.key === "Escape") return show(null);
      if (!(event.key in steps) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const from = marks.indexOf(current);
      const start = from >= 0 ? from : steps[event.key] > 0 ? -1 : marks.length;
      const to = start + steps[event.key];
      show(marks[Math.min(Math.max(to, 0), marks.length - 1)]);
    });
    figure.addEventListener("blur", () => show(null));
  }

  // The gallery shows one reason, or all.
  const chips = [...document.querySelectorAll(".chips button")];
  const groups = [...document.querySelectorAll(".gallery .group[data-reason]")];
  for (const chip of chips) {
    chip.addEventListener("click", () => {
      for (const other of chips) other.setAttribute("aria-pressed", String(other === chip));
      for (const group of groups) group.hidden = chip.dataset.reason !== "all" && group.dataset.reason !== chip.dataset.reason;
    });
  }
})();
