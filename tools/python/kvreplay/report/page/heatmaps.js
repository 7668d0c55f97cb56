// Layer by layer similarity of the sets, a square a policy, all on one scale.

/** A colour of the shared scale, 0 to 1. */
function colourAt(share) {
  const place = Math.min(1, Math.max(0, share)) * (page.colours.length - 1);
  const below = Math.min(Math.floor(place), page.colours.length - 2);
  const [a, b] = [page.colours[below], page.colours[below + 1]];
  return a.map((part, i) => Math.round(part + (place - below) * (b[i] - part)));
}

/** The matrix [n, n] of a plane that holds what lies above its diagonal. */
function squareOf(bytes, n) {
  const above = new Uint16Array(bytes.buffer);
  const matrix = new Float64Array(n * n).fill(1);
  for (let i = 0, k = 0; i < n; i++)
    for (let j = i + 1; j < n; j++, k++) matrix[i * n + j] = matrix[j * n + i] = above[k] / 65535;
  return matrix;
}

function paint(canvas, n, value) {
  canvas.width = n.width ?? n;
  canvas.height = n.height ?? n;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  for (let i = 0; i < canvas.width * canvas.height; i++) image.data.set([...colourAt(value(i)), 255], 4 * i);
  context.putImageData(image, 0, 0);
}

let paintings = 0;

async function drawHeatmaps(trace, budget, variant) {
  const n = trace.layers.length, end = budget.scale[variant];
  const cells = budget.cells.filter((cell) => cell.jaccard && cell.choice && passes(cell.label));
  const drawing = ++paintings;
  const planes = await Promise.all(cells.map((cell) => bytesOf(cell.jaccard[variant])));
  if (drawing !== paintings) return; // something else was chosen meanwhile
  const box = document.getElementById("heatmaps"), pair = document.getElementById("pair");
  const figures = cells.map((cell, c) => {
    const below = n < 2 ? "one layer"
      : `adjacent ${cell.adjacent[variant].toFixed(3)}, chance ${cell.chance[variant].toFixed(3)}`;
    const caption = make("figcaption", {}, make("b", {}, named(cell)), make("span", {}, below));
    if (!planes[c]) return make("figure", {}, make("p", { class: "quiet" }, "omitted: page too large"), caption);
    const matrix = squareOf(planes[c], n);
    const canvas = make("canvas", { role: "img", "aria-label": `${cell.label}: similarity of ${n} layers, ${below}` });
    paint(canvas, n, (i) => matrix[i] / end);
    canvas.addEventListener("pointermove", (event) => {
      const i = Math.min(n - 1, Math.floor((event.offsetY / canvas.clientHeight) * n));
      const j = Math.min(n - 1, Math.floor((event.offsetX / canvas.clientWidth) * n));
      if (i < 0 || j < 0) return;
      const layers = `layers ${trace.layers[i]} and ${trace.layers[j]}`;
      pair.textContent = `${plain(cell.label)}: ${layers} share ${matrix[i * n + j].toFixed(3)}`;
    });
    return make("figure", { "data-label": cell.label,
      onclick: (event) => selectPolicy(cell.label, event.shiftKey) }, canvas, caption);
  });
  const rest = [[(cell) => !cell.rows, "No static set"],
    [(cell) => cell.rows && !cell.choice, "Keeps everything, or only protected tokens"]];
  document.getElementById("unlike").textContent = plain(
    rest.map(([is, words]) => [words, budget.cells.filter((cell) => is(cell) && passes(cell.label)).map(named)])
      .filter(([, labels]) => labels.length).map(([words, labels]) => `${words}: ${labels.join(", ")}.`).join(" "));
  const bar = make("canvas", { role: "img", "aria-label": `colours from 0 to ${end}` });
  paint(bar, { width: 128, height: 1 }, (i) => i / 127);
  document.getElementById("scale").replaceChildren("0", bar, end < 1 ? `${end} and more` : "1",
    make("span", { class: "quiet" }, `layers ${trace.layers[0]} to ${trace.layers[n - 1]}, from the upper left`));
  box.replaceChildren(...figures);
  markSelected();
}
