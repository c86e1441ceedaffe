// Filtering sites and near misses: rows that do not hold the words are hidden, groups that hold one are opened.
"use strict";
const field = document.getElementById("filter");
if (field) {
  const groups = Array.from(document.querySelectorAll("details.group"));
  const opened = new Map(groups.map((group) => [group, group.open]));
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const group of groups) {
      const fusion = group.querySelector(".fusion").textContent;
      let here = 0;
      const rows = group.querySelectorAll("tr[data-row]");
      if (!rows.length) continue; // the tables of outputs
      for (const row of rows) {
        const text = (fusion + " " + row.textContent).toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        here += row.hidden ? 0 : 1;
      }
      group.hidden = here === 0;
      group.open = words.length ? here > 0 : opened.get(group);
      found += here;
    }
    document.getElementById("found").textContent = words.length ? found + (found === 1 ? " place" : " places") : "";
  });
}
// On paper everything is open.
addEventListener("beforeprint", () => document.querySelectorAll("details.group").forEach((group) => { group.open = true; }));
