// Shows the values at the pointer, chooses the heat map, and copies a digest. The page is complete without this.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const time = (us) => us == null ? "–" : us === 0 ? "0" : us < 999.5 ? us.toPrecision(3) + " µs"
  : us < 999500 ? (us / 1000).toPrecision(3) + " ms" : (us / 1e6).toFixed(1) + " s";
const count = (n) => n.toLocaleString("en");

function describeEpoch([labels, columns], x) {
  const epochs = data.epochs, last = epochs.length - 1;
  const wanted = epochs[0] + x * (epochs[last] - epochs[0]);
  let index = 0;
  for (let i = 1; i <= last; i++) if (Math.abs(epochs[i] - wanted) < Math.abs(epochs[index] - wanted)) index = i;
  const place = last ? (epochs[index] - epochs[0]) / (epochs[last] - epochs[0]) : 0.5;
  return [place, [`epoch ${epochs[index] + 1}`, ...labels.map((label, i) => `${label} ${columns[i][index]}`)]];
}

function describeSteps(area, x, y) {
  const times = data.times, size = times.steps.length, index = Math.min(size - 1, Math.floor(x * size));
  const first = times.first + index * times.width, last = first + times.steps[index] - 1;
  const lines = [last > first ? `steps ${count(first)} to ${count(last)}, per step` : `step ${count(first)}`];
  if ("map" in area.dataset) {
    const row = Math.min(times.devices.length - 1, Math.floor(y * times.devices.length));
    lines.push(times.devices[row], ...["compute", "exchange", "update", "input"].map(
      (part) => `${part.padEnd(9)}${time(times.parts[part][row][index])}`));
  } else {
    for (const name in times.bars) lines.push(`${name.padEnd(17)}${time(times.bars[name][index])}`);
  }
  return [(index + 0.5) / size, lines];
}

for (const area of document.querySelectorAll(".area")) {
  const cross = document.createElement("div"), tip = document.createElement("div");
  cross.className = "cross";
  tip.className = "tip";
  const show = (x, y) => {
    const [place, lines] = "panel" in area.dataset
      ? describeEpoch(data.panels[area.dataset.panel], x) : describeSteps(area, x, y);
    tip.textContent = lines.join("\n");
    cross.style.left = `${100 * place}%`;
    area.append(cross, tip);
    const room = area.clientWidth - tip.offsetWidth, wanted = place * area.clientWidth;
    tip.style.left = `${Math.max(0, Math.min(room, wanted < area.clientWidth / 2 ? wanted + 12 : wanted - tip.offsetWidth - 12))}px`;
    if (area.clientHeight < 90) tip.style.top = `${area.clientHeight + 4}px`;
  };
  let x = 0, y = 0;
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    x = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    y = Math.min(Math.max((event.clientY - box.top) / box.height, 0), 0.999);
    show(x, y);
  });
  area.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -0.02, ArrowRight: 0.02 }[event.key];
    if (step) show(x = Math.min(Math.max(x + step, 0), 1), y);
  });
  for (const end of ["pointerleave", "blur"]) area.addEventListener(end, () => { cross.remove(); tip.remove(); });
}

const chooseMap = () => {
  const chosen = document.querySelector(".tabs input:checked");
  for (const map of document.querySelectorAll(".map")) map.hidden = chosen && map.dataset.part !== chosen.value;
};
for (const tab of document.querySelectorAll(".tabs input")) tab.addEventListener("change", chooseMap);
chooseMap();

for (const button of document.querySelectorAll("button.digest")) {
  button.addEventListener("click", async () => {
    const code = button.querySelector("code");
    getSelection().selectAllChildren(code);
    try { await navigator.clipboard.writeText(code.textContent); } catch { document.execCommand("copy"); }
    button.classList.add("copied");
    setTimeout(() => button.classList.remove("copied"), 1500);
  });
}
