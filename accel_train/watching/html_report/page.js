"use strict";
// Hovering and toggling. The page is complete without it.
const data = JSON.parse(document.getElementById("data").textContent);

function nearest(steps, wanted) {
  let low = 0;
  let high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - steps[low] <= steps[high] - wanted ? low : high;
}

function follow(figure, chart) {
  const svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  figure.append(tip);

  function show(event) {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * data.width;
    const share = Math.min(1, Math.max(0, (x - data.left) / (data.right - data.left)));
    const wanted = share * data.last_step;
    const lines = [];
    let shown = null;
    chart.curves.forEach((curve, index) => {
      if (svg.querySelector(`[data-curve="${index}"]`).style.display === "none") return;
      const point = nearest(curve.steps, wanted);
      const step = curve.steps[point];
      if (shown === null || Math.abs(step - wanted) < Math.abs(shown - wanted)) shown = step;
      lines.push(`${curve.label}: ${curve.values[point].toPrecision(5)} at step ${step}`);
    });
    if (shown === null) return hide();
    const at = data.left + ((data.right - data.left) * shown) / Math.max(1, data.last_step);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.setAttribute("visibility", "visible");
    tip.textContent = lines.join("\n");
    tip.hidden = false;
    // On the side with more room.
    const outer = figure.getBoundingClientRect();
    const left = box.left - outer.left + (at / data.width) * box.width;
    const onRight = left < outer.width / 2;
    tip.style.left = onRight ? `${left + 10}px` : "auto";
    tip.style.right = onRight ? "auto" : `${outer.width - left + 10}px`;
    tip.style.top = `${box.top - outer.top + 8}px`;
  }

  function hide() {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  }

  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
  for (const box of figure.querySelectorAll("input[data-curve]")) {
    box.addEventListener("change", () => {
      svg.querySelector(`[data-curve="${box.dataset.curve}"]`).style.display = box.checked ? "" : "none";
      hide();
    });
  }
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  follow(figure, data.charts[Number(figure.dataset.chart)]);
}
for (const controls of document.querySelectorAll(".controls")) controls.hidden = false;
for (const box of document.querySelectorAll("input[data-toggle]")) {
  box.addEventListener("change", () => document.body.classList.toggle(`hide-${box.dataset.toggle}`, !box.checked));
}
