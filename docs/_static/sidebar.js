// Show the entry of the current page in the sidebar, which otherwise opens at its top.
addEventListener("DOMContentLoaded", () => {
  const sidebar = document.querySelector(".sidebar-scroll");
  const page = sidebar?.querySelector(".sidebar-tree .current-page");
  if (!page) return;
  const below = page.getBoundingClientRect().top - sidebar.getBoundingClientRect().top;
  sidebar.scrollBy({ top: below - sidebar.clientHeight / 3, behavior: "instant" });
});
