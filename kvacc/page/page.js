"use strict";
// Sorting, filtering, configurations and the flip explorer. The tables and pictures are in the page
// already: this script only moves, hides and adds.
(() => {
  const find = (selector, within = document) => within.querySelector(selector);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const data = JSON.parse(find("#data").textContent);
  const board = find("#board"), form = find("#filters"), dialog = find("#configuration");

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  // ---- sorting ----------------------------------------------------------------------------
  const NUMBER = /^[+-]?\d+(\.\d+)?/;

  // What a cell sorts by: its own value, else the number it begins with, else its text; null for "-".
  function sortValue(cell) {
    if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
    const text = cell.textContent.trim();
    if (text === "" || text === "-" || text.startsWith("- (")) return null;
    const number = text.match(NUMBER);
    return number ? Number(number[0]) : text;
  }

  function compare(one, other) {
    if (typeof one === "number" && typeof other === "number") return one - other;
    return String(one).localeCompare(String(other), "en", { numeric: true });
  }

  // Rows without a value stay last in both directions. `first` keeps groups of rows apart.
  function sortRows(rows, column, sign, first) {
    const keyed = rows.map((row, place) => ({ row, place, key: sortValue(row.cells[column]), group: first(row) }));
    keyed.sort((a, b) => {
      if (a.group !== b.group) return a.group - b.group;
      if ((a.key === null) !== (b.key === null)) return a.key === null ? 1 : -1;
      return (a.key === null ? 0 : sign * compare(a.key, b.key)) || a.place - b.place;
    });
    return keyed.map((entry) => entry.row);
  }

  function sortable(table, first) {
    const heads = all("thead th", table).filter((head) => find("button", head));
    for (const head of heads) {
      find("button", head).addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending" ||
          (!head.hasAttribute("aria-sort") && head.classList.contains("n"));
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        sortNow(table, first);
      });
    }
  }

  function sortNow(table, first) {
    const head = find("thead [aria-sort]", table);
    if (!head) return;
    const sign = head.getAttribute("aria-sort") === "descending" ? -1 : 1;
    for (const body of table.tBodies) {
      const rows = [...body.rows].filter((row) => !row.classList.contains("heading"));
      body.append(...sortRows(rows, head.cellIndex, sign, first));
    }
  }

  // The baseline first, then one protocol after the other: they are never ranked together.
  const protocolFirst = (row) => (row.classList.contains("full") ? -1 : Number(row.dataset.o));
  sortable(board, protocolFirst);

  // Keyboard users stop at two links of each row, its configuration and its flips, not at ten.
  for (const row of all("tbody tr", board)) {
    const links = all("a", row);
    links.slice(1).filter((link) => !link.hash.startsWith("#flips-")).forEach((link) => { link.tabIndex = -1; });
  }

  for (const link of all("figure svg a")) link.setAttribute("tabindex", "-1");

  // ---- filters ----------------------------------------------------------------------------
  const ofTable = ["model", "task", "shots"];
  const bodies = [...board.tBodies];
  const total = all("tbody tr:not(.heading)", board).length;
  const words = new WeakMap();  // of a row and its table's heading, once they are looked for

  function wordsOf(row) {
    if (!words.has(row)) {
      words.set(row, (row.textContent + " " + row.parentElement.rows[0].textContent).toLowerCase());
    }
    return words.get(row);
  }

  function filter() {
    const wanted = Object.fromEntries(new FormData(form));
    const text = (wanted.find || "").trim().toLowerCase();
    const fits = (holder, names) => names.every((name) => !wanted[name] || holder.dataset[name] === wanted[name]);
    let shown = 0;
    for (const body of bodies) {
      const inTable = fits(body, ofTable);
      let others = 0, full = [];
      for (const row of body.rows) {
        if (row.classList.contains("heading")) continue;
        const isFull = row.classList.contains("full");
        const found = inTable && (!text || wordsOf(row).includes(text)) && (isFull ||
          ((!wanted.protocol || row.dataset.p === wanted.protocol) &&
           (!wanted.budget || row.dataset.b === wanted.budget) &&
           (!wanted.strategy || row.dataset.s === wanted.strategy)));
        row.hidden = !found;
        if (isFull) full.push(row); else others += found;
      }
      // The baseline stands beside what is compared with it, also where the text is not in it.
      const alone = others === 0 && (wanted.protocol || wanted.budget || wanted.strategy);
      for (const row of full) {
        if (others > 0) row.hidden = false; else if (alone) row.hidden = true;
      }
      const visible = [...body.rows].filter((row) => !row.hidden && !row.classList.contains("heading")).length;
      body.hidden = visible === 0;
      shown += visible;
    }
    for (const section of all(".pictures")) {
      const figures = all("figure", section);
      for (const figure of figures) figure.hidden = !fits(figure, [...ofTable, "protocol"]);
      find(".empty", section).hidden = figures.some((figure) => !figure.hidden);
    }
    find("#count").textContent = `${shown} of ${total} rows shown.`;
  }

  function orderTables() {
    const name = form.elements.order.value;
    const value = (body) => (name === "score" ? -Number(body.dataset.score) : body.dataset[name]);
    const sorted = bodies.map((body, place) => ({ body, place }));
    // "model" is the order that the page came in.
    if (name !== "model") sorted.sort((a, b) => compare(value(a.body), value(b.body)) || a.place - b.place);
    board.append(...sorted.map((entry) => entry.body));
  }

  form.addEventListener("input", filter);
  form.elements.order.addEventListener("change", orderTables);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => { filter(); orderTables(); }));
  form.hidden = false;
  filter();

  // ---- configurations ---------------------------------------------------------------------
  const TITLES = {
    spec: "Asked for", strategy: "Strategy", scores: "Scores", measured: "Measured", fidelity: "Fidelity to full", task: "Task as run",
    model: "Model", environment: "Versions and hardware",
  };

  function name(id) {
    const spec = data.cells.parts[data.cells.of[id].spec];
    const sampler = spec.shots && spec.fewshot_sampler !== "default" ? ` ${spec.fewshot_sampler}` : "";
    const shots = spec.shots === undefined ? "" : `, ${spec.shots}-shot${sampler}`;
    const row = find(`#row-${CSS.escape(id)}`);
    return `${row.dataset.s} ${row.dataset.b} `.trim() + `, ${spec.task}${shots}, ${row.dataset.p}`;
  }

  function asText(value) {
    return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
  }

  function list(values) {
    const made = element("dl");
    for (const [key, value] of Object.entries(values)) {
      made.append(element("dt", key.replaceAll("_", " ")), element("dd", asText(value)));
    }
    return made;
  }

  function showConfiguration(id) {
    const entry = data.cells.of[id], body = find("#configuration-body");
    find("#configuration-h").textContent = name(id);
    body.replaceChildren(element("p", `Cell ${id}`));
    for (const warning of entry.warnings || []) body.append(element("p", `Warning: ${warning}`));
    if (data.flips.rows[id]) {
      const link = element("a", "Items that flipped", { href: `#flips-${id}` });
      body.append(element("p"));
      body.lastChild.append(link);
    }
    for (const [part, title] of Object.entries(TITLES)) {
      if (entry[part] !== undefined) body.append(element("h3", title), list(data.cells.parts[entry[part]]));
    }
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  }

  let opener = null;
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (link && !dialog.contains(link)) opener = link;
  });

  // A closed dialog must not come back with "reload", and the same link must work again.
  dialog.addEventListener("close", () => {
    if (opener) opener.focus({ preventScroll: true });
    if (data.cells.of[place()]) history.replaceState(null, "", location.pathname + location.search);
  });
  find("#close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

  // ---- flips ------------------------------------------------------------------------------
  const flipRow = find("#flip-row"), flipWay = find("#flip-way"), flipTable = find("#flip-table");
  sortable(flipTable, () => 0);

  function fillRows() {
    let group;
    for (const row of all("tbody tr", board)) {
      if (row.classList.contains("heading")) {
        group = element("optgroup", undefined, { label: row.textContent.trim() });
        continue;
      }
      const id = row.id.slice(4), flips = data.flips.rows[id];
      if (!flips) continue;
      const count = flips.lost.length + flips.gained.length + flips.hidden;
      if (count === 0) continue;
      if (!group.isConnected) flipRow.append(group);
      group.append(element("option", `${row.dataset.s} ${row.dataset.b}, ${row.dataset.p}: ${row.cells[5].textContent}`,
        { value: id }));
    }
    find("#explorer").hidden = flipRow.options.length === 0;
  }

  const answer = (value) => (value === null ? "not stored" : typeof value === "number" ? `option ${value}` : value);
  const margin = (value) => (value === null ? "-" : value.toFixed(3));

  function showFlips() {
    const id = flipRow.value, flips = data.flips.rows[id];
    if (!flips) return;
    const rows = [];
    for (const way of ["lost", "gained"]) {
      if (flipWay.value && flipWay.value !== way) continue;
      for (const [place, own, its] of flips[way]) {
        const [doc, hash, target, full, fulls, lost, gained] = data.flips.documents[flips.table][place];
        const texts = [`${doc} (${hash})`, way, answer(target), answer(full), answer(own), margin(fulls), margin(its),
          `${lost} of ${flips.compared}`, `${gained} of ${flips.compared}`];
        const row = element("tr");
        texts.forEach((text, column) => row.append(
          element(column ? "td" : "th", text, [0, 5, 6, 7, 8].includes(column) ? { class: "n" } : {})));
        row.cells[0].scope = "row";
        rows.push(row);
      }
    }
    flipTable.tBodies[0].replaceChildren(...rows);
    sortNow(flipTable, () => 0);
    const hidden = flips.hidden ? `; ${flips.hidden} more are in the samples of the cell, left out of this page for its size` : "";
    const count = find("#flip-count");
    const heading = find(`#row-${CSS.escape(id)}`).parentElement.rows[0].textContent.trim();
    count.textContent = `${heading}. ${rows.length} items shown${hidden}. "Lost by" counts the rows of this table that were compared with full. `;
    count.append(element("a", "Configuration", { href: `#${id}` }));
  }

  flipRow.addEventListener("change", showFlips);
  flipWay.addEventListener("change", showFlips);
  fillRows();
  showFlips();

  // ---- places on the page -----------------------------------------------------------------
  function place() {
    try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; }
  }

  function go() {
    const id = place();
    if (data.cells.of[id]) showConfiguration(id);
    else if (id.startsWith("flips-") && data.flips.rows[id.slice(6)]) {
      opener = null;
      if (dialog.open) dialog.close();
      flipRow.value = id.slice(6);
      flipWay.value = "";
      showFlips();
      find("#flips").scrollIntoView();
      flipRow.focus({ preventScroll: true });
    }
  }
  addEventListener("hashchange", go);
  go();

  // ---- colours ----------------------------------------------------------------------------
  const theme = find("#theme"), root = document.documentElement;
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const sayTheme = () => { theme.textContent = isDark() ? "Light colours" : "Dark colours"; };
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; sayTheme(); });
  theme.hidden = false;
  sayTheme();
})();
