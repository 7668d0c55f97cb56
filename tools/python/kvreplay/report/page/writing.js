// The texts of the live model, each beside that of the full cache.

const NOTHING = "(nothing: the model ended its answer at once)";

/** How many letters two texts begin with alike. */
function alike(one, other) {
  let at = 0;
  while (at < one.length && at < other.length && one[at] === other[at]) at++;
  return at;
}

/** A text with visible line feeds; empty lines take no room. */
function withLineFeeds(text) {
  return text.replace(/\n+/g, (feeds) => "↵".repeat(feeds.length) + "\n");
}

function drawWriting(trace, budget) {
  const cells = budget.cells.filter((cell) => typeof cell.written === "string" && cell.label !== "full");
  document.getElementById("writing").hidden = !cells.length;
  document.querySelector("a[href='#writing']").hidden = !cells.length;
  const entries = cells.flatMap((cell) => {
    const at = alike(cell.written, trace.written ?? cell.written);
    const rest = at < cell.written.length ? make("mark", {}, withLineFeeds(cell.written.slice(at))) : "";
    const pieces = cell.written ? [withLineFeeds(cell.written.slice(0, at)), rest] : [NOTHING];
    return [make("dt", {}, cell.label), make("dd", {}, ...pieces)];
  });
  document.getElementById("written").replaceChildren(
    make("dt", {}, "full cache"), make("dd", {}, trace.written === null
      ? "not generated: kvreplay live RUN -p full --generate N adds it" : withLineFeeds(trace.written) || NOTHING), ...entries);
}
