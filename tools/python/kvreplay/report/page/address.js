// The state of the page as the fragment of its address: NAME=VALUE of each control with data-remember, the token, the
// order of each table, and each policy that the legend hides.

const requested = new Map(); // values of the address, until the control has such an option

function readAddress() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of state) requested.set(name, value);
  hidden.clear();
  for (const label of state.getAll("hide")) hidden.add(label);
  for (const input of document.querySelectorAll("input[data-remember]")) {
    input.value = requested.get(input.id) ?? "";
    requested.delete(input.id);
  }
  for (const order of Object.values(orders)) {
    order.title = requested.get(`${order.prefix}sort`) || null;
    order.descending = requested.get(`${order.prefix}order`) !== "ascending";
  }
}

function writeAddress() {
  const state = new URLSearchParams();
  for (const control of document.querySelectorAll("[data-remember]")) {
    if (control.tagName === "SELECT" || control.value) state.set(control.id, control.value);
  }
  if (reading.at >= 0 && reading.held) state.set("token", reading.at);
  for (const label of hidden) state.append("hide", label);
  for (const { prefix, title, descending } of Object.values(orders)) {
    if (!title) continue;
    state.set(`${prefix}sort`, title);
    state.set(`${prefix}order`, descending ? "descending" : "ascending");
  }
  history.replaceState(null, "", `#${state}`);
}
