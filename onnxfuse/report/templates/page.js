// Filtering sites and near misses: rows that do not hold the words are hidden, groups that hold one are opened.
const field = $("filter");
if (field) {
  const groups = Array.from(document.querySelectorAll("#plan details.group, #misses details.group"));
  const opened = new Map(groups.map((group) => [group, group.open]));
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let found = 0;
    for (const group of groups) {
      const fusion = group.querySelector(".fusion").textContent;
      let here = 0;
      for (const row of group.querySelectorAll("tr[data-row]")) {
        const text = (fusion + " " + row.textContent).toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        here += row.hidden ? 0 : 1;
      }
      group.hidden = here === 0;
      group.open = words.length ? here > 0 : opened.get(group);
      found += here;
    }
    $("found").textContent = words.length ? found + (found === 1 ? " place" : " places") : "";
  });
}
// On paper every chart is drawn; tables that repeat a chart stay closed, all others are open.
addEventListener("beforeprint", () => {
  for (const holder of drawn) holder.begin();
  for (const group of document.querySelectorAll("details.group:not(.table, #node-list)")) group.open = true;
});
document.documentElement.dataset.ready = "";
