// The state of the page as the fragment of its address: NAME=VALUE of each control with data-remember, and the token.

const requested = new Map(); // values of the address, until the control has such an option

function readAddress() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) requested.set(name, value);
  for (const input of document.querySelectorAll("input[data-remember]")) {
    input.value = requested.get(input.id) ?? "";
    requested.delete(input.id);
  }
  sorting.title = requested.get("sort") || null;
  sorting.descending = requested.get("order") !== "ascending";
}

function writeAddress() {
  const state = new URLSearchParams();
  for (const control of document.querySelectorAll("[data-remember]")) {
    if (control.tagName === "SELECT" || control.value) state.set(control.id, control.value);
  }
  if (reading.at >= 0 && reading.held) state.set("token", reading.at);
  if (sorting.title) {
    state.set("sort", sorting.title);
    state.set("order", sorting.descending ? "descending" : "ascending");
  }
  history.replaceState(null, "", `#${state}`);
}
