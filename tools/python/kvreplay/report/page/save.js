// Tables as Markdown, LaTeX and CSV on the clipboard; figures as SVG and PNG files.

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "font-size", "font-family",
  "font-weight", "text-anchor"];
const PNG_SCALE = 2;
const NAMES = 2; // columns of words, policy and heads: the others are numbers

/**
 * The shown cells of a table, row by row: {text, values, best}; headings of groups and drawings are left out. A cell
 * has a value for each of its columns in CSV.
 */
function rowsOf(table) {
  return [...table.rows].filter((row) => !row.matches(".group, .kinds, .failed")).map((row) =>
    [...row.cells].filter((cell) => !cell.matches(".drawn")).map((cell) => {
      const text = cell.textContent.replace(/ [↑↓]$/, "").replaceAll("\u00a0", "").trim();
      const { value, values } = cell.dataset;
      return { text, values: values ? JSON.parse(values) : [value ?? text], best: cell.matches(".best") };
    }));
}

/** What the numbers of a table are. */
function aboutTable(id) {
  const free = shown.budget.cells.filter((cell) => groupOf(cell) === OWN_MEMORY && passes(cell.label));
  const unequal = free.length ? `. Not at equal memory: ${free.map(({ label }) => label).join(", ")}` : "";
  const about = id === "means"
    ? `${$("mean-metric").value}, budget ${shown.budget.budget}, open loop. ${$("compared").textContent}`
    : `${$("line").textContent}, open loop. Budget: ${shown.budget.line}`;
  return unequal ? about.replace(/\.$/, "") + unequal : about;
}

/** Documents say what the numbers are; CSV has the numbers alone. */
const WRITERS = {
  Markdown: ([head, ...rows], about) => {
    const line = (texts) => `| ${texts.join(" | ")} |`;
    const escaped = (text) => text.replaceAll("|", "\\|").replaceAll("*", "\\*");
    const cell = ({ text, best }) => (best ? `**${text.replace(/\*$/, "")}**` : escaped(text));
    return [line(head.map(cell)), line(head.map((_, i) => (i < NAMES ? "---" : "---:"))),
      ...rows.map((row) => line(row.map(cell))), "", about].join("\n");
  },
  LaTeX: ([head, ...rows], about) => {
    const escaped = (text) => text.replaceAll("\\", "\\textbackslash ").replace(/[&%$#_{}]/g, "\\$&")
      .replaceAll("~", "\\textasciitilde ").replaceAll("^", "\\textasciicircum ");
    const cell = ({ text, best }) => (best ? `\\textbf{${escaped(text.replace(/\*$/, ""))}}` : escaped(text));
    const line = (row) => `${row.map(cell).join(" & ")} \\\\`;
    return [`% ${about}`, `\\begin{tabular}{${"l".repeat(NAMES)}${"r".repeat(head.length - NAMES)}}`, "\\toprule", line(head),
      "\\midrule", ...rows.map(line), "\\bottomrule", "\\end{tabular}"].join("\n");
  },
  CSV: (rows) => rows.map((row) => row.flatMap(({ values }) => values).map(String).map((value) =>
    (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value)).join(",")).join("\r\n"),
};

function addCopyButtons(place) {
  const said = make("span", { class: "quiet", role: "status" });
  const buttons = Object.entries(WRITERS).map(([name, write]) => make("button", { type: "button",
    onclick: async () => {
      try {
        await navigator.clipboard.writeText(`${write(rowsOf($(place.dataset.copy)), aboutTable(place.dataset.copy))}\n`);
        said.textContent = `copied as ${name}`;
      } catch (problem) {
        said.textContent = `not copied: ${problem.message}`;
      }
    } }, name));
  place.replaceChildren("Copy table as ", ...buttons, said);
}

/** A colour as rgb() with numbers: other programs do not read the newer notations of browsers. */
function plainColour(colour) {
  if (!/^(ok|color|lab|lch)/.test(colour)) return colour;
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  const [r, g, b] = context.getImageData(0, 0, 1, 1).data;
  return `rgb(${r}, ${g}, ${b})`;
}

/** A copy of a drawing whose elements have their styles as attributes. */
function styled(drawing) {
  const copy = drawing.cloneNode(true);
  const [from, to] = [drawing, copy].map((one) => [one, ...one.querySelectorAll("*")]);
  from.forEach((one, i) => {
    const style = getComputedStyle(one);
    if (!["title", "image"].includes(one.tagName)) {
      for (const name of STYLES) to[i].setAttribute(name, plainColour(style.getPropertyValue(name)));
    }
    for (const name of ["class", "style", "id"]) to[i].removeAttribute(name);
  });
  return copy;
}

/** The shown policies of a chart's legend below a drawing, and its height. */
function legendBelow(box, width, top) {
  const group = make("g", {});
  let [x, y] = [10, top];
  for (const button of box.querySelectorAll(".series-legend [data-label][aria-pressed=true]")) {
    const name = button.textContent, size = 50 + 7.5 * name.length;
    if (x > 10 && x + size > width) [x, y] = [10, y + 20];
    const key = styled(button.querySelector("svg"));
    const parts = make("g", { transform: `translate(${x} ${y})` }, ...key.childNodes,
      make("text", { x: 34, y: 10, ...textStyle() }, name));
    group.append(parts);
    x += size;
  }
  return [group, y + 24];
}

function textStyle() {
  const style = getComputedStyle(document.body);
  return { fill: plainColour(style.color), "font-size": "12px", "font-family": style.fontFamily };
}

/** The colour scale of the similarities, and the layers and sets that they compare; its lower edge. */
function drawScale(drawing, width) {
  const [least, bar, most, layers] = $("scale").childNodes;
  const write = (x, y, words) => drawing.append(make("text", { x, y, ...textStyle() }, words));
  write(10, 18, least.textContent);
  drawing.append(make("image", { x: 22, y: 9, width: 128, height: 10, href: bar.toDataURL(), preserveAspectRatio: "none" }));
  write(156, 18, most.textContent);
  const lines = linesOf(`${layers.textContent}; sets: ${$("variant").selectedOptions[0].text}`, width);
  lines.forEach((line, i) => write(10, 36 + 16 * i, line));
  return 28 + 16 * lines.length;
}

/** The squares of the similarity of layers as one drawing, at least two squares wide for its scale. */
function heatmapsDrawing() {
  const figures = [...document.querySelectorAll("#heatmaps figure:has(canvas)")], side = 160, columns = 5;
  const width = Math.max(2, Math.min(columns, figures.length)) * (side + 14) + 10;
  const captions = figures.map((figure) =>
    [...figure.querySelectorAll("figcaption > *")].flatMap((line) => linesOf(line.textContent, side)));
  const tall = side + 20 + 15 * Math.max(...captions.map((lines) => lines.length));
  const drawing = make("svg", {}), top = drawScale(drawing, width - 20);
  figures.forEach((figure, i) => {
    const [x, y] = [10 + (i % columns) * (side + 14), top + Math.floor(i / columns) * tall];
    drawing.append(make("image", { x, y, width: side, height: side, href: figure.querySelector("canvas").toDataURL(),
      "image-rendering": "pixelated" }));
    captions[i].forEach((line, j) =>
      drawing.append(make("text", { x, y: y + side + 15 + 15 * j, ...textStyle() }, line)));
  });
  drawing.setAttribute("viewBox", `0 0 ${width} ${top + Math.ceil(figures.length / columns) * tall}`);
  return drawing;
}

/** A figure as the text of an SVG file, with its origin as the last line. */
function svgOf(id) {
  const box = $(id), shownDrawing = box.querySelector("svg[role]");
  const drawing = shownDrawing ? styled(shownDrawing) : heatmapsDrawing();
  let [, , width, height] = drawing.getAttribute("viewBox").split(" ").map(Number);
  const section = box.closest("section"), heading = section.querySelector(".axis") ?? section.querySelector("h2");
  const room = width - 20, above = linesOf(heading.textContent, room), down = 8 + 16 * above.length;
  const [legend, below] = legendBelow(box, width, height + 4);
  height = below;
  const { at } = document.querySelector(`[data-save="${id}"]`).dataset;
  const origin = [shown.trace.name, shown.trace.model, at ?? `budget ${shown.budget.budget}`, "open loop"].join(", ");
  const note = box.querySelector(".free")?.textContent;
  const notes = [...(note ? linesOf(note, room) : []), ...linesOf(origin, room)];
  const ground = plainColour(getComputedStyle(document.documentElement).backgroundColor);
  const written = (lines, top) => lines.map((line, i) => make("text", { x: 10, y: top + 16 * i, ...textStyle() }, line));
  const body = make("g", { transform: `translate(0 ${down})` }, ...drawing.childNodes, legend, ...written(notes, height));
  height += down + 16 * notes.length - 2;
  const whole = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height },
    make("rect", { width, height, fill: ground }),
    ...written(above, 18), body);
  return [new XMLSerializer().serializeToString(whole), width, height];
}

/** The same in light colours, whatever the page has: figures are saved for papers. */
function lightSvgOf(id) {
  const dark = isDark();
  if (dark) setTheme(false);
  try {
    return svgOf(id);
  } finally {
    if (dark) setTheme(true);
  }
}

function download(name, blob) {
  const url = URL.createObjectURL(blob);
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function savePng(name, id) {
  const [text, width, height] = lightSvgOf(id), image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = make("canvas", { width: width * PNG_SCALE, height: height * PNG_SCALE });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => download(`${name}.png`, blob));
}

function addSaveButtons(place) {
  const { save, name } = place.dataset;
  const svg = () => download(`${name}.svg`, new Blob([lightSvgOf(save)[0]], { type: "image/svg+xml" }));
  place.replaceChildren("Save as ", make("button", { type: "button", onclick: svg }, "SVG"),
    make("button", { type: "button", onclick: () => savePng(name, save) }, "PNG"));
}
