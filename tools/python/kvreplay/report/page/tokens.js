// The prompt's text, each token shaded; one pane, or two with differences marked, and what is known of one token.

const SHADES = 16;
const OUTLINED = ["needle", "question", "answer"];
const UNLIKE = 0.25; // shares of sets that differ by this much are marked
const DECADES = 4; // of later attention between the darkest shade and none

const reading = { at: -1, held: false, panes: [], view: null };

/** What stands for a token's text: line breaks and nothing become visible. */
function visible(text) {
  return plain(text || "·").replace(/\n/g, "↵\n");
}

/** The class of each token that does not change with the view: outlines of spans, and whether it is compressed. */
function fixedClasses(trace) {
  const classes = Array.from({ length: trace.tokens }, (_, i) => (i < trace.boundary ? "" : "after"));
  const outlined = trace.spans.filter((span) => OUTLINED.includes(span.kind))
    .sort((a, b) => b.end - b.begin - (a.end - a.begin));
  const depth = new Uint8Array(trace.tokens);
  for (const span of outlined) {
    const end = Math.min(span.end, trace.tokens);
    for (let i = span.begin; i < end; i++) {
      if (depth[i] > 1) continue;
      classes[i] += ` ${depth[i] ? "inner" : "outer"}-${span.kind}`;
      if (!depth[i] && i === span.begin) classes[i] += " begin";
      if (!depth[i] && i === end - 1) classes[i] += " end";
      depth[i]++;
    }
  }
  return classes;
}

/** New panes, with the chosen token in sight. */
function buildPanes(trace, count) {
  const classes = fixedClasses(trace);
  reading.panes = Array.from({ length: count }, (_, number) => {
    const spans = [];
    const look = trace.text ? "prose" : "prose positions";
    const list = make("div", { class: look, role: "listbox", tabindex: 0, dir: "auto" });
    for (let i = 0; i < trace.tokens; i++) {
      if (trace.before?.[i]) list.append(visible(trace.before[i]));
      const span = document.createElement("span");
      span.textContent = trace.text ? visible(trace.text[i]) : String(i);
      span.setAttribute("role", "option");
      span.id = `token-${number}-${i}`;
      span.place = i;
      spans.push(span);
      list.append(span);
    }
    const heading = make("h3", {});
    const pane = { list, spans, classes, heading, box: make("div", { class: "pane" }, heading, list) };
    list.addEventListener("pointerover", (event) => {
      const { place } = event.target;
      if (place !== undefined && !reading.held && event.pointerType === "mouse") choose(place);
    });
    list.addEventListener("click", (event) => {
      const { place } = event.target;
      if (place === undefined) return;
      reading.held = !(reading.held && reading.at === place);
      choose(place);
      writeAddress();
    });
    list.addEventListener("focus", () => reading.at < 0 && choose(0));
    list.addEventListener("keydown", (event) => walk(event, pane));
    list.addEventListener("scroll", () => {
      for (const other of reading.panes) if (other !== pane) other.list.scrollTop = list.scrollTop;
    });
    return pane;
  });
  document.getElementById("panes").replaceChildren(...reading.panes.map((pane) => pane.box));
  if (reading.at >= 0) {
    choose(reading.at);
    reveal(reading.panes[0].list.clientHeight / 3);
  }
}

/** The nearest token on the line above (-1) or below (1). */
function besideLine(pane, direction) {
  const spans = pane.spans, here = spans[reading.at].getBoundingClientRect();
  let best = reading.at, line = null;
  for (let i = reading.at + direction; i >= 0 && i < spans.length; i += direction) {
    const box = spans[i].getClientRects()[0];
    if (Math.abs(box.top - here.top) < 4) continue;
    if (line !== null && Math.abs(box.top - line) >= 4) break;
    const away = Math.abs(box.left - here.left);
    if (line === null || away < Math.abs(spans[best].getClientRects()[0].left - here.left)) best = i;
    line = box.top;
  }
  return best;
}

function walk(event, pane) {
  const last = pane.spans.length - 1, at = Math.max(0, reading.at);
  const goals = {
    ArrowRight: () => at + 1, ArrowLeft: () => at - 1, ArrowDown: () => besideLine(pane, 1),
    ArrowUp: () => besideLine(pane, -1), PageDown: () => at + 100, PageUp: () => at - 100,
    Home: () => 0, End: () => last,
  };
  if (event.key === "Enter" || event.key === " ") reading.held = true;
  else if (event.key === "Escape") reading.held = false;
  else if (!goals[event.key]) return;
  event.preventDefault();
  choose(Math.min(last, Math.max(0, goals[event.key]?.() ?? at)));
  reveal(30);
  writeAddress();
}

/** Scrolls the panes, and not the page, to the chosen token: `room` pixels between it and the edge. */
function reveal(room) {
  const pane = reading.panes[0];
  const box = pane.spans[reading.at].getBoundingClientRect(), frame = pane.list.getBoundingClientRect();
  if (box.top < frame.top) pane.list.scrollTop -= frame.top - box.top + room;
  if (box.bottom > frame.bottom) pane.list.scrollTop += box.bottom - frame.bottom + room;
}

/** Scrolls to a token; selects it if `held`, else the pointer may choose another one. */
function jumpTo(token, held = true) {
  reading.held = held;
  choose(token);
  reveal(reading.panes[0].list.clientHeight / 3);
  writeAddress();
}

/** The next of some ascending tokens after the chosen one, the first after the last. */
function jumpToNext(tokens) {
  const next = tokens.find((token) => token > reading.at) ?? tokens[0];
  if (next === undefined) return;
  jumpTo(next);
  $("panes").scrollIntoView({ block: "nearest" });
}

/** The first compressed token of an answer, else of a needle; -1 without these spans. */
function firstToken(trace) {
  const begin = (kind) => trace.spans.filter((span) => span.kind === kind && span.begin < trace.boundary)
    .map((span) => span.begin).sort((a, b) => a - b);
  const [found] = [...begin("answer"), ...begin("needle")];
  return found ?? -1;
}

function drawJumps(trace) {
  const kinds = OUTLINED.filter((kind) => trace.spans.some((span) => span.kind === kind));
  $("jumps").replaceChildren(...kinds.map((kind) => make("button", { type: "button", class: `jump-${kind}`,
    onclick: () => jumpToNext(trace.spans.filter((span) => span.kind === kind).map((span) => span.begin)
      .sort((a, b) => a - b)) }, kind)));
}

/** Which tokens contain a part of the matches of a text, or have this position: bool [tokens]. */
function matches(trace, text) {
  const found = new Uint8Array(trace.tokens), sought = text.toLowerCase();
  if (!trace.text) {
    if (Number(text) in found) found[Number(text)] = 1;
    return found;
  }
  const pieces = trace.text.map((piece, i) => [(trace.before?.[i] ?? "").toLowerCase(), piece.toLowerCase()]);
  const whole = pieces.flat().join("");
  const ends = [];
  pieces.reduce((at, [before, own], i) => ends[i] = at + before.length + own.length, 0);
  for (let at = whole.indexOf(sought), i = 0; at >= 0; at = whole.indexOf(sought, at + 1)) {
    while (ends[i] <= at) i++;
    for (let j = i; j < ends.length && ends[j] - pieces[j][1].length < at + sought.length; j++) found[j] = 1;
  }
  return found;
}

/** The tokens that the filter keeps: bool [tokens], or null without a filter. `shares`: of each policy. */
function filtered(view, shares) {
  const { trace } = view, kind = $("tokens").value, sought = $("find").value;
  if (!kind && !sought) return null;
  const found = sought ? matches(trace, sought) : new Uint8Array(trace.tokens).fill(1);
  if (!kind) return found;
  const [a, b] = [shares[0], shares[1] ?? new Float64Array(trace.boundary)];
  const keeps = { first: (i) => a[i] >= 0.5, second: (i) => b[i] >= 0.5, evicted: (i) => a[i] < 0.5 && b[i] < 0.5,
    "more-first": (i) => a[i] - b[i] >= UNLIKE, "more-second": (i) => b[i] - a[i] >= UNLIKE }[kind];
  return found.map((one, i) => one && i < trace.boundary && a && keeps(i) ? 1 : 0);
}

function fillFilters(view) {
  const [a, b] = view.labels;
  fill($("tokens"), [["", "all"], ["first", `kept by ${a}`], ...(b ? [["second", `kept by ${b}`],
    ["more-first", `kept more by ${a}`], ["more-second", `kept more by ${b}`]] : []),
    ["evicted", b ? "evicted by both" : `evicted by ${a}`]]);
}

/** Makes a token the one that is spoken of. */
function choose(i) {
  for (const pane of reading.panes) {
    pane.spans[reading.at]?.removeAttribute("aria-selected");
    pane.spans[i].setAttribute("aria-selected", "true");
    pane.list.setAttribute("aria-activedescendant", pane.spans[i].id);
  }
  reading.at = i;
  drawToken();
  drawCursor();
}

/** The shade of each token, 0 to SHADES. */
function shadesOf(view, cell) {
  const { trace, layer, shade } = view, tokens = trace.boundary;
  if (shade === "attention") {
    const received = attentionOf(trace, layer, tokens), most = received.reduce((a, b) => Math.max(a, b), 0);
    return Uint8Array.from(received, (one) =>
      one > 0 ? Math.max(0, Math.round(SHADES * (1 + Math.log10(one / most) / DECADES))) : 0);
  }
  if (shade === "rank") {
    const ranks = ranksOf(cell, layer, tokens);
    return ranks && Uint8Array.from(ranks, (rank) => Math.round(SHADES * (1 - rank)));
  }
  const share = shareOf(view, cell);
  // The square root: at a small budget most shares are small.
  return share && Uint8Array.from(share, (one) => (one ? Math.max(1, Math.round(SHADES * Math.sqrt(one))) : 0));
}

/** Of the sets that the view shows the share that keeps each token; null without sets. */
function shareOf(view, cell) {
  if (!cell?.bits) return null;
  const sets = shownSets(view.trace, cell, view.layer, view.head, view.finest);
  return Float64Array.from(keptBy(cell.bits, sets, view.trace.boundary), (count) => count / sets.length);
}

/** Whether the run has the scores that ranks come from. */
function ranksAreSaved(view) {
  return view.budget.cells.some((cell) => cell.ranks !== undefined);
}

/** Why a policy's pane has no shades. */
function whyPlain(view, cell) {
  if (!cell) return "failed at this budget, or was not replayed";
  if (!cell.rows) return "no static set";
  if (!cell.bits) return "sets omitted, page too large; use kvreplay report -p or -b to show less";
  if (view.shade === "rank" && !shadesOf(view, cell)) {
    return cell.ranks === undefined
      ? "no ranks; use kvreplay replay --save scores, with policies that rank the whole prompt once"
      : cell.rankLevels ? "this layer has no separate ranks" : "ranks omitted, page too large";
  }
  return "";
}

/** Shades both panes in one pass; says how they differ. */
function drawText(view) {
  const { trace, cells } = view;
  const before = reading.view;
  if (before?.trace !== trace) [reading.at, reading.held] = [-1, false];
  reading.view = view;
  if (before?.trace !== trace || reading.panes.length !== cells.length) buildPanes(trace, cells.length);
  fillFilters(view);
  const shares = cells.map((cell) => shareOf(view, cell));
  const compared = cells.length === 2 && shares[0] && shares[1];
  const kept = filtered(view, shares);
  reading.passing = kept && Array.from(kept.keys()).filter((i) => kept[i]);
  const more = [0, 0];
  cells.forEach((cell, number) => {
    const pane = reading.panes[number], shades = cell?.bits ? shadesOf(view, cell) : null;
    const why = whyPlain(view, cell);
    const schedule = cell?.schedule ? "tokens resident at the end of the prompt" : "";
    const note = [cell ? `heads=${cell.heads}` : "", schedule, why].filter(Boolean).join("; ");
    pane.heading.replaceChildren(view.labels[number], make("span", { class: "quiet" }, ` ${note}`));
    pane.list.setAttribute("aria-label", `Tokens, shaded for ${view.labels[number]}`);
    for (let i = 0; i < trace.tokens; i++) {
      let name = pane.classes[i];
      if (i < trace.boundary) {
        if (shades) name += ` k${shades[i]}`;
        if (compared && shares[number][i] - shares[1 - number][i] >= UNLIKE) {
          name += " more";
          more[number]++;
        }
      }
      if (kept && !kept[i]) name += " dim";
      if (pane.spans[i].className !== name) pane.spans[i].className = name;
    }
  });
  const [a, b] = view.labels;
  document.getElementById("difference").textContent = !compared ? ""
    : plain("Underlined: kept by this policy and not by the other, in a quarter of the sets or more: "
      + `${more[0]} tokens by ${a}, ${more[1]} by ${b}.`);
  $("found").textContent = kept ? `${reading.passing.length} of ${trace.tokens} tokens` : "";
  $("next").disabled = !reading.passing?.length;
  drawLegend(view);
  drawToken();
}

function drawLegend(view) {
  const [words, least, most] = {
    kept: ["share of sets that keep a token", "none", "all"],
    rank: ["rank in its layer", "last", "first"],
    attention: ["attention of evaluation queries, logarithmic", "1/10,000 of the maximum", "maximum"],
  }[view.shade];
  const steps = Array.from({ length: SHADES / 2 + 1 }, (_, i) => make("span", { class: `swatch k${2 * i}` }));
  const kinds = OUTLINED.filter((kind) => view.trace.spans.some((span) => span.kind === kind));
  const others = view.trace.spans.filter((span) => !OUTLINED.includes(span.kind))
    .map((span) => `${span.name} ${span.begin} to ${span.end - 1}`);
  const parts = [make("span", {}, `${words}: ${least} `, make("span", { class: "swatches" }, ...steps), ` ${most}`),
    ...kinds.map((kind) => make("span", {}, make("span", { class: `swatch outer-${kind} begin end` }), ` ${kind}`))];
  const say = (...words) => parts.push(make("span", { class: "quiet" }, ...words));
  if (view.trace.tokens > view.trace.boundary) {
    say(make("i", {}, "italic"), ": after the compressed tokens, never evicted");
  }
  if (others.length) say(`not outlined: ${others.join(", ")}`);
  if (!ranksAreSaved(view)) say("no ranks in this run; use kvreplay replay --save scores");
  document.getElementById("legend").replaceChildren(...parts);
}

/** What is known of the chosen token. */
function drawToken() {
  const view = reading.view, i = reading.at, box = document.getElementById("token");
  if (!view || i < 0) {
    box.replaceChildren(make("p", { class: "quiet" }, "No token chosen."));
    return;
  }
  const { trace, layer, head, finest } = view;
  const facts = [];
  const add = (name, ...value) => facts.push(make("dt", {}, name), make("dd", {}, ...value));
  const spans = trace.spans.filter((span) => span.begin <= i && i < span.end).map((span) => span.name);
  if (spans.length) add("in", spans.join(", "));
  const bars = [];
  if (i >= trace.boundary) {
    add("kept", "not compressed: after the tokens under compression");
  } else {
    view.cells.forEach((cell, number) => add(view.labels[number], ...wordsOn(view, cell, i)));
    if (trace.attention?.bytes) {
      const value = attentionOf(trace, layer, trace.boundary)[i];
      const size = value ? brief(value) : "less than 10⁻⁶ of the maximum";
      add("attention", `${size}${meanOver(layer < 0, true)}, summed over evaluation queries`);
    }
    for (const cell of view.budget.cells) {
      if (!cell.bits || !passes(cell.label)) continue;
      const sets = shownSets(trace, cell, layer, head, finest);
      const kept = sets.reduce((sum, set) => sum + keeps(cell.bits, set, i, trace.boundary), 0);
      bars.push(make("li", {}, make("span", { class: "name" }, named(cell)),
        make("span", { class: "bar", "--share": kept / sets.length, "aria-hidden": "true" }),
        make("span", { class: "number" }, `${kept}/${sets.length}`)));
    }
  }
  const of = layer < 0 && head < 0 ? "all layers and heads" : "this layer or head";
  box.replaceChildren(
    make("h3", {}, `Token ${i}`, ...(trace.text ? [" ", make("code", {}, visible(trace.text[i]))] : []),
      make("span", { class: "quiet" }, reading.held ? " selected" : "")),
    make("dl", {}, ...facts),
    ...(bars.length ? [make("p", { class: "quiet" }, `Sets that keep it (${of}):`),
      make("ul", { class: "bars" }, ...bars)] : []));
}

function meanOver(layers, heads) {
  const names = [layers && "layers", heads && "heads"].filter(Boolean);
  return names.length ? `, mean over ${names.join(" and ")}` : "";
}

/** A cell on one token, in words. */
function wordsOn(view, cell, i) {
  if (!cell?.bits) return [whyPlain(view, cell)];
  const { trace, layer, head, finest } = view;
  const sets = shownSets(trace, cell, layer, head, finest);
  const keeping = sets.filter((set) => keeps(cell.bits, set, i, trace.boundary));
  const layers = new Set(keeping.map((set) => Math.floor(set / cell.rows)));
  const words = sets.length === 1 ? [keeping.length ? "kept" : "not kept"]
    : [`${keeping.length} of ${sets.length} sets`];
  if (layer < 0) words.push(`in ${layers.size} of ${trace.layers.length} layers`);
  const [first, recent] = [(set) => cell.rule[set], (set) => cell.rule[cell.rule.length / 2 + set]];
  const byRule = (set) => i < first(set) || i >= trace.boundary - recent(set);
  const ruled = cell.rule ? sets.filter(byRule).length : 0;
  if (ruled) words.push(ruled === sets.length ? "protected (sink or recent)" : `${ruled} protected (sink or recent)`);
  const ranks = ranksOf(cell, layer, trace.boundary);
  if (!ranks) words.push(`no ${ranksAreSaved(view) ? "separate " : ""}rank`);
  else words.push(`rank: top ${percent(ranks[i])}${meanOver(layer < 0, cell.rows > 1)}`);
  return [words.join("; ")];
}
